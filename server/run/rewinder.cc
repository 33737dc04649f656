#include "server/run/rewinder.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

std::string Kept(const std::vector<uint64_t>& steps) {
  return steps.empty() ? "none is kept yet" : absl::StrCat("kept are those of steps ", absl::StrJoin(steps, ", "));
}

}  // namespace

void Rewinder::OnClosed(uint64_t step, absl::FunctionRef<RunMemory()> memory) {
  SnapshotRing& ring = *environment_.snapshots;
  ring.Complete();
  const bool written = environment_.checkpointer != nullptr && environment_.checkpointer->Due(step);
  if ((!ring.Due(step) && !written) || !ring.HasPlace()) return;
  ring.Begin(memory());
  if (written) environment_.checkpointer->OnBegun(ring.last_id());
  ShowSnapshots();
}

void Rewinder::Checkpoint(absl::FunctionRef<RunMemory()> memory) {
  SnapshotRing& ring = *environment_.snapshots;
  if (!ring.HasPlace()) return;
  ring.Begin(memory());
  environment_.checkpointer->OnBegun(ring.last_id());
  ShowSnapshots();
}

std::optional<uint64_t> Rewinder::BeginBringing(SnapshotRing::OldestSnapshot oldest) {
  const auto id = environment_.snapshots->BeginBringing(oldest);
  ShowSnapshots();
  return id;
}

// Those that are kept to be written alone are not for a rewind.
void Rewinder::ShowSnapshots() {
  if (environment_.spec->snapshots > 0) environment_.reporter->ShowSnapshots(environment_.snapshots->steps());
}

void Rewinder::AskItself(RewindOrder order, std::string why, absl::AnyInvocable<void()> rewound) {
  Ask(std::move(order),
      [this, why = std::move(why), rewound = std::move(rewound)](const absl::StatusOr<Rewound>& done) mutable {
        if (done.ok()) return rewound();
        environment_.reporter->LogNotRewound(absl::StrCat(why, "; ", std::string(done.status().message())));
      });
}

void Rewinder::CarryOut() {
  while (!due_.empty()) {
    absl::StatusOr<Rewound> rewound = RewindNow(due_.front().order);
    if (absl::IsUnavailable(rewound.status())) return;
    RewindDone done = std::move(due_.front().done);
    due_.pop_front();
    done(std::move(rewound));
  }
}

void Rewinder::End(const absl::Status& status) {
  for (Due& due : std::exchange(due_, {})) due.done(status);
}

absl::StatusOr<uint64_t> Rewinder::SnapshotFor(const RewindOrder& order) const {
  if (order.brought) return *order.to_step;
  const RunSpec& spec = *environment_.spec;
  const SnapshotRing& ring = *environment_.snapshots;
  if (spec.snapshots == 0) {
    return absl::FailedPreconditionError(absl::StrCat("run '", spec.run_id,
                                                      "' keeps no snapshots; create it with "
                                                      "RunSpec.rewind.snapshots of 1 or more"));
  }
  const uint64_t closed = environment_.machine->step() - 1, back = order.steps_back.value_or(0);
  const uint64_t wanted = order.to_step.value_or(closed - std::min(closed, back));
  const auto nearest = ring.NearestTo(wanted);
  if (nearest && (!order.to_step || *nearest == wanted)) return *nearest;
  return absl::FailedPreconditionError(absl::StrCat("run '", spec.run_id, "', at step ", closed,
                                                    ", has no snapshot of step ", wanted,
                                                    order.to_step ? "" : " or before", "; ", Kept(ring.steps()),
                                                    ", and one is taken every ", spec.snapshot_every, " steps"));
}

absl::StatusOr<PullSource> Rewinder::SourceOf(uint64_t step) const {
  PullSource source{.store = environment_.store, .snapshots = environment_.snapshots.get()};
  if (step == 0) return source;
  ASSIGN_OR_RETURN(step, SnapshotFor({.to_step = step}));
  source.snapshot = source.snapshots->IdOf(step);
  return source;
}

absl::StatusOr<Rewound> Rewinder::RewindNow(const RewindOrder& order) {
  ASSIGN_OR_RETURN(const uint64_t to_step, SnapshotFor(order));
  const uint64_t from_step = environment_.machine->step() - 1;
  RETURN_IF_ERROR(environment_.discard(to_step));
  if (order.brought) environment_.snapshots->Accept(*order.brought);
  environment_.recall(environment_.snapshots->Restore(to_step));
  if (environment_.checkpointer != nullptr) environment_.checkpointer->OnRewound(to_step);
  if (environment_.journal != nullptr) {
    environment_.journal->OnRewound(to_step, environment_.machine->generation(), order.brought.has_value());
  }
  environment_.reporter->OnRewound(from_step, to_step, order.reason);
  ShowSnapshots();
  return Rewound{to_step, environment_.machine->generation()};
}

}  // namespace ballast
