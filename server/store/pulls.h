// The readers of a run's weights. Each has one chunk under way, and the run's queue encodes them in turn, so none waits
// for another's pace. As many as ReaderCount (plan.h) are served side by side; the next is refused with
// RESOURCE_EXHAUSTED. A reader that takes nothing for the run's pull_timeout_s loses its pull. So does one that takes
// less than PullJob::kLeastBytesPerS of a copy for as long, while another reader waits for the copy.
//
// Strand-confined. Memory: what each reader's PullJob holds, and the copy of WeightCopies; part of the plan.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/store/digest_job.h"
#include "server/store/pull_job.h"
#include "server/store/weight_copies.h"
#include "server/store/weight_sink.h"

namespace ballast {

// As v1::PullRequest, checked: all `tensors` are tensors of the run.
struct PullOrder {
  std::vector<uint32_t> tensors;
  uint64_t step = 0;
  std::vector<uint64_t> digests = {};  // by place in `tensors`, or none; only of the latest, and of weights alone
  std::vector<StateSlot> slots = {StateSlot::kWeights};
  ChunkSet parts = {};       // what is sent of the tensors
  WeightSeries series = {};  // whose kWeights and kMaster are meant
};

class Pulls {
 public:
  struct Environment {
    const RunSpec* spec;
    ParameterStore* store;
    DigestJob* digests;
    std::function<absl::StatusOr<PullSource>(uint64_t step)> source_of;  // as in Rewinder
  };
  explicit Pulls(Environment environment);

  void Begin(PullOrder order, std::shared_ptr<WeightSink> sink);
  void OnWritten(const WeightSink* sink);
  void OnGone(const WeightSink* sink);
  void Tick(double now_s);
  void End(const absl::Status& why);

 private:
  struct Reader {
    std::shared_ptr<PullJob> job;
    double ended_s = 0;  // when its job was seen to be stopped; 0: it is not
  };
  // Leaves out the tensors that the reader already has.
  void Compare(const std::shared_ptr<PullJob>& job, PullOrder order);
  size_t served() const;
  absl::Status OverdueOf(const PullJob& job, double now_s) const;

  const Environment environment_;
  WeightCopies copies_;
  std::vector<Reader> readers_;  // until they are gone
};

}  // namespace ballast
