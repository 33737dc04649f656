// How the step runner takes snapshots and goes back to one.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/run/step_runner.h"

namespace ballast {
namespace {

std::string Kept(const std::vector<uint64_t>& steps) {
  return steps.empty() ? "none is kept yet" : absl::StrCat("kept are those of steps ", absl::StrJoin(steps, ", "));
}

}  // namespace

uint64_t StepRunner::snapshot_bytes() const { return environment_.snapshots->bytes(); }

uint64_t StepRunner::client_state_bytes() const {
  return ClientStateBytes(links_.size(), environment_.snapshots->most());
}

// The step has closed, and all that it updates is submitted.
void StepRunner::KeepSnapshot() {
  SnapshotRing& ring = *environment_.snapshots;
  ring.Complete();
  const ClosedStep& closed = results_.back();
  if (!ring.Due(closed.step)) return;
  RunMemory memory{.result = closed,
                   .loss = Loss(),
                   .stopped = stopped_,
                   .client_states = {},
                   .detector = detector_,
                   .last_lr = last_lr_};
  if (tensor_clip_) memory.norms = tensor_clip_->averages();
  for (const Link& link : links_) memory.client_states.push_back(link.state);
  ring.Begin(std::move(memory));
  ShowSnapshots();
}

// When no stream and no update waits for the devices.
void StepRunner::SaveInIdleTime() {
  if (updating_ > 0) return;
  for (const Link& link : links_) {
    if (link.stream != nullptr && !link.sender->idle()) return;
  }
  environment_.snapshots->SaveNext([this] { Settle(); });
}

void StepRunner::ShowSnapshots() {
  const std::vector<uint64_t> steps = environment_.snapshots->steps();
  environment_.metrics->OnSnapshots(steps.size());
  environment_.board->Write([&](RunStatus& s) { s.snapshots = steps; });
}

void StepRunner::Rewind(RewindOrder order, RewindDone done) {
  rewinds_due_.push_back({std::move(order), std::move(done)});
  if (executing_ == 0) Settle();  // else what follows the effects does
}

void StepRunner::RewindItself(RewindOrder order, std::string why, absl::AnyInvocable<void()> rewound) {
  Rewind(std::move(order),
         [this, why = std::move(why), rewound = std::move(rewound)](const absl::StatusOr<Rewound>& done) mutable {
           if (done.ok()) return rewound();
           Log(LogLevel::kWarn, "rewound", "the run cannot be rewound",
               {{"run_id", environment_.spec->run_id},
                {"err", absl::StrCat(why, "; ", std::string(done.status().message()))}});
         });
}

// A step that is being judged comes first.
void StepRunner::CarryOutRewinds() {
  while (!rewinds_due_.empty() && measuring_ == 0) {
    absl::StatusOr<Rewound> rewound = RewindNow(rewinds_due_.front().order);
    if (absl::IsUnavailable(rewound.status())) return;
    RewindDone done = std::move(rewinds_due_.front().done);
    rewinds_due_.pop_front();
    done(std::move(rewound));
  }
}

absl::StatusOr<uint64_t> StepRunner::SnapshotFor(const RewindOrder& order) const {
  const RunSpec& spec = *environment_.spec;
  const SnapshotRing& ring = *environment_.snapshots;
  if (spec.snapshots == 0) {
    return absl::FailedPreconditionError(absl::StrCat("run '", spec.run_id,
                                                      "' keeps no snapshots; create it with "
                                                      "RunSpec.rewind.snapshots of 1 or more"));
  }
  const uint64_t closed = machine_.step() - 1, back = order.steps_back.value_or(0);
  const uint64_t wanted = order.to_step.value_or(closed - std::min(closed, back));
  const auto nearest = ring.NearestTo(wanted);
  if (nearest && (!order.to_step || *nearest == wanted)) return *nearest;
  return absl::FailedPreconditionError(absl::StrCat("run '", spec.run_id, "', at step ", closed,
                                                    ", has no snapshot of step ", wanted,
                                                    order.to_step ? "" : " or before", "; ", Kept(ring.steps()),
                                                    ", and one is taken every ", spec.snapshot_every, " steps"));
}

absl::StatusOr<PullSource> StepRunner::SourceOf(uint64_t step) const {
  PullSource source{.store = environment_.store, .snapshots = environment_.snapshots.get()};
  if (step == 0) return source;
  ASSIGN_OR_RETURN(step, SnapshotFor({.to_step = step}));
  source.snapshot = source.snapshots->IdOf(step);
  return source;
}

absl::StatusOr<Rewound> StepRunner::RewindNow(const RewindOrder& order) {
  const auto to_step = SnapshotFor(order);
  if (!to_step.ok()) return to_step.status();
  const uint64_t from_step = machine_.step() - 1;
  if (auto s = Execute(machine_.Handle(event::Rewind{*to_step}, MonotonicSeconds())); !s.ok()) return s;
  ++rewinds_;
  Recall(environment_.snapshots->Restore(*to_step));
  environment_.metrics->OnRewind(order.reason);
  ShowSnapshots();
  ShowRanks();
  Log(LogLevel::kWarn, "rewound", "run rewound to a snapshot",
      {{"run_id", environment_.spec->run_id},
       {"step", *to_step},
       {"from_step", from_step},
       {"generation", machine_.generation()},
       {"reason", order.reason}});
  return Rewound{*to_step, machine_.generation()};
}

void StepRunner::Recall(const RunMemory& memory) {
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    links_[rank].state = memory.client_states[rank];
    links_[rank].coming_state.reset();
    links_[rank].held_promised = 0;
  }
  detector_.GoBackTo(memory.detector);
  if (tensor_clip_) tensor_clip_->set_averages(memory.norms);
  last_lr_ = memory.last_lr;
  end_values_.clear();
  results_ = {memory.result};
  stopped_ = memory.stopped;
  environment_.board->Write([&](RunStatus& s) {
    s.step = memory.result.step;
    s.loss = memory.loss;
    s.last_result = memory.result;
    s.failure = stopped_;
    ++s.rewinds;
  });
}

}  // namespace ballast
