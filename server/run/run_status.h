// What a run shows of itself: a value, copied under a small lock, so that nobody who looks waits for a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/follow/followers.h"
#include "server/metrics/metrics.h"
#include "server/plan/plan.h"
#include "server/run/run_activity.h"
#include "server/step/awaited_rank.h"
#include "server/step/step_record.h"

namespace ballast {

struct RankStatus {
  std::string peer;       // empty: nobody holds the rank
  std::string transport;  // of its last stream; empty: none yet
  bool connected = false;
  double disconnected_at_s = 0;  // MonotonicSeconds
};

// What one tensor showed at a step.
struct TensorStatus {
  uint32_t tensor = 0;
  std::optional<double> rms_ratio = {};
  double gradient_norm = 0, gradient_absmax = 0, update_norm = 0;
  uint64_t nonfinite = 0;  // elements
};
inline constexpr size_t kTensorsShown = 20;

// What of a run is on the disk.
struct Durability {
  uint64_t durable_step = 0;                // 0: none
  uint64_t checkpoint_bytes = 0;            // of the newest checkpoint
  std::optional<double> written_at_s = {};  // MonotonicSeconds: when it was published, also by an earlier daemon
  std::string last_failure = {};            // of the last one that was to be written; empty: it was
  std::string restored = {};                // from which checkpoint the run was read back; empty: it was not
  bool writing = false;
  std::string journal_failure = {};  // why steps are not journaled now; empty: they are, or nobody wants it
};

struct RunStatus {
  RunState state = RunState::kWaiting;
  std::string failure;  // why, of kFailed; otherwise why no step begins any more, if so
  bool weights_loaded = false;
  uint64_t generation = 1;
  std::optional<double> rms_ratio_max = {};
  PlanBytes bytes;  // live
  // By layer group, at the last step that updated it; the optional parts at its last step with full statistics.
  std::vector<StepRecord::Layer> layers;
  std::vector<RankStatus> ranks;          // by rank; empty until one has attached
  std::vector<AwaitedRank> awaited;       // by the open step, as of the last tick
  std::optional<StepRecord> last_result;  // the last closed step; after a rewind, the one rewound to
  std::vector<TensorStatus> tensors;      // of the last step that was applied: the kTensorsShown of the largest RMS_t
  double step_s = 0;
  uint64_t applied = 0, skipped = 0, partial = 0, aborted = 0;
  uint64_t received_bytes = 0, sent_bytes = 0;
  std::vector<uint64_t> snapshots;  // steps that the run can be rewound to, ascending
  uint64_t rewinds = 0;
  std::optional<Durability> durability = {};      // none: there is no storage
  std::optional<FollowFigures> follow = {};       // none: the spec does not have it
  std::optional<double> unattended_since_s = {};  // MonotonicSeconds, since no rank is held; none: one is
  // Likewise, and earlier, of a run that was read from the disk, and that its trainers had left before.
  std::optional<double> left_before_s = {};
};

// Thread-safe.
class RunStatusBoard {
 public:
  RunStatus Read() const {
    absl::MutexLock lock(&mu_);
    return status_;
  }
  template <typename Change>
  void Write(Change change) {
    absl::MutexLock lock(&mu_);
    change(status_);
  }

 private:
  mutable absl::Mutex mu_;
  RunStatus status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
