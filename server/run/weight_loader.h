// The weights and state that trainers upload: before the run's first step, or, as a replacement, between two steps.
//
// A replacement waits until every connected rank has the last step's weights and result. Then steps and weights wait
// for it: a StepBegin is not taken, nothing of the run's last steps goes out, readers are sent away. When it has ended
// well, the generation is raised and every session ends as by a rewind to the last step; steps count on. Older
// snapshots stay, and what is learned from steps (spikes, clipping of a tensor by its own norm) goes on.
//
// Chunks are in the store at once, since the plan has no room for a second copy. So a call that was cut leaves what it
// brought: until another one has brought all of the tensors that it has begun, or a rewind puts all back, the run
// counts as without weights, and no step begins. One that is refused before its first chunk changes nothing.
//
// Strand-confined. Each `done` is called exactly once, on the strand.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

#include "server/run/run_status.h"
#include "server/run/step_driver.h"
#include "server/spec/run_spec.h"
#include "server/store/digest_job.h"
#include "server/store/load_job.h"
#include "server/store/parameter_store.h"

namespace ballast {

class WeightLoader {
 public:
  using Done = absl::AnyInvocable<void(absl::Status)>;
  // All outlive the loader.
  struct Environment {
    const RunSpec* spec;
    ParameterStore* store;
    StepDriver* driver;
    DigestJob* digests;
    RunStatusBoard* board;
    std::function<void(const absl::Status& why)> end_readers;
  };
  explicit WeightLoader(Environment environment);

  // Takes the place of any upload that is under way. What an earlier one has loaded of weights is to be loaded anew,
  // and of state is forgotten; not so by a replacement.
  void Begin(LoadCall call, bool replaces, Done done);
  void Load(LoadCall call, std::vector<LoadChunk> chunks, Done done);
  void Finish(LoadCall call, DigestJob::Done done);
  void Abandon(LoadCall call);
  // Answers what is under way with this status.
  void End(const absl::Status& why);
  // Of an amended run, before anything else: the first `kept` tensors have weights, and the others need some.
  void GoOnFrom(uint32_t kept);
  // The run went back to a snapshot, which has all.
  void OnRewound();

  bool loaded() const { return loaded_; }
  bool loaded_by(SessionId session) const { return loaded_ && by_ == session; }
  // OK, or why the latest weights cannot be read: UNAVAILABLE while a replacement is under way.
  absl::Status CheckRead() const;

 private:
  absl::Status Check(SessionId session) const;
  absl::Status CheckMoment(bool replaces) const;
  bool IsCurrent(LoadCall call) const { return load_ != nullptr && call_ == call; }
  void BeginReplacement();
  void EndReaders();
  // Whether the run has weights, and why not.
  void Show(bool loaded);
  // The upload is over; what it has begun and not brought whole is lacking from now on.
  void Leave();
  bool lacks_any() const;

  const Environment environment_;
  LoadNeeds needs_;
  bool loaded_ = false;
  std::optional<SessionId> by_;  // whose weights there are
  LoadCall call_;
  bool replaces_ = false;  // call_
  std::shared_ptr<LoadJob> load_;
};

}  // namespace ballast
