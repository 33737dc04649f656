// A run's snapshots: taken when steps have closed, and gone back to when somebody asks for it. What is asked for waits
// until it can be carried out, in order.
//
// Strand-confined. The images are reserved with the run.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/run/checkpointer.h"
#include "server/run/step_reporter.h"
#include "server/spec/run_spec.h"
#include "server/step/step_machine.h"
#include "server/storage/journal.h"
#include "server/store/parameter_store.h"
#include "server/store/pull_job.h"
#include "server/store/snapshot_ring.h"

namespace ballast {

// To which snapshot: that of this step, or of so many before the last closed one, or the nearest before; neither: the
// latest.
struct RewindOrder {
  std::optional<uint64_t> to_step = {};
  std::optional<uint32_t> steps_back = {};
  std::string reason = "operator";  // of ballast_rewinds_total
  // to_step is that of this snapshot, which was brought from a checkpoint, and is one once the run is back there.
  std::optional<uint64_t> brought = {};
};
struct Rewound {
  uint64_t step = 0;        // the run is as when it had closed
  uint64_t generation = 0;  // since
};
using RewindDone = absl::AnyInvocable<void(absl::StatusOr<Rewound>)>;

class Rewinder {
 public:
  // All but the snapshots outlive the rewinder.
  struct Environment {
    const RunSpec* spec;
    const StepMachine* machine;
    ParameterStore* store;
    std::unique_ptr<SnapshotRing> snapshots;
    StepReporter* reporter;
    // Discards the steps since this one, and ends every session. UNAVAILABLE, and nothing changes, while a step is
    // being judged.
    std::function<absl::Status(uint64_t to_step)> discard;
    // Gives back what was known at that step to those who decide from earlier steps. Weights and state are back.
    std::function<void(const RunMemory& memory)> recall;
    Checkpointer* checkpointer = nullptr;  // none: the run is not checkpointed
    Journal* journal = nullptr;            // none: it has none
  };
  explicit Rewinder(Environment environment) : environment_(std::move(environment)) {}

  // The step has closed, and all that it updates is submitted. `memory` is called where a snapshot of it is due.
  void OnClosed(uint64_t step, absl::FunctionRef<RunMemory()> memory);
  // No step is open, and no update goes on: what there is now is to be written, if there is a place. `memory` likewise.
  void Checkpoint(absl::FunctionRef<RunMemory()> memory);
  // A place for a snapshot that is to be brought, as SnapshotRing has it.
  std::optional<uint64_t> BeginBringing(SnapshotRing::OldestSnapshot oldest);
  // Of a run that nobody is attached to: it is what the snapshot of this step says.
  const RunMemory& GoOnFrom(uint64_t step) {
    const RunMemory& memory = environment_.snapshots->Restore(step);
    environment_.recall(memory);
    return memory;
  }
  // The tensor's next update is about to be submitted.
  void BeforeUpdate(uint32_t tensor) { environment_.snapshots->BeforeUpdate(tensor); }
  // The devices have nothing else to do: one more tensor of the snapshot under way is copied, then `done` is called.
  void SaveNext(std::function<void()> done) { environment_.snapshots->SaveNext(std::move(done)); }

  // Carried out by CarryOut. FAILED_PRECONDITION names the snapshots kept.
  void Ask(RewindOrder order, RewindDone done) { due_.push_back({std::move(order), std::move(done)}); }
  // For the run itself: calls `rewound` when it is done; where it cannot be done, the log says so, with `why`.
  void AskItself(RewindOrder order, std::string why, absl::AnyInvocable<void()> rewound);
  bool due() const { return !due_.empty(); }
  // Carries out what was asked for, until a step is being judged. Not while effects are carried out.
  void CarryOut();
  // Answers all who have asked with this status.
  void End(const absl::Status& status);

  // For a PullJob: of the snapshot of `step`, or with 0 the latest weights. FAILED_PRECONDITION as above.
  absl::StatusOr<PullSource> SourceOf(uint64_t step) const;
  SnapshotRing& snapshots() { return *environment_.snapshots; }
  uint64_t bytes() const { return environment_.snapshots->bytes(); }          // of the images
  uint64_t most_snapshots() const { return environment_.snapshots->most(); }  // that are kept

 private:
  struct Due {
    RewindOrder order;
    RewindDone done;
  };

  absl::StatusOr<uint64_t> SnapshotFor(const RewindOrder& order) const;
  void ShowSnapshots();
  absl::StatusOr<Rewound> RewindNow(const RewindOrder& order);

  const Environment environment_;
  std::deque<Due> due_;
};

}  // namespace ballast
