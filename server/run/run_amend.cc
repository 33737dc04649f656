// How a run with another spec takes a run's place in the middle of it. The new one has reserved all that it needs, but
// for the planes that it takes over, before anything of the old one is touched.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/run/run.h"

namespace ballast {

absl::Status Run::CheckHold(SessionId session) const {
  const StepMachine& machine = driver_->machine();
  const StepGate& gate = driver_->executor().gate();
  if (gate.replacing()) {
    return absl::UnavailableError(
        absl::StrCat("run '", spec_.run_id, "' is being amended, or its weights replaced; ask again"));
  }
  RETURN_IF_ERROR(machine.CheckCurrent(session));
  if (machine.step_open()) {
    return absl::FailedPreconditionError(
        absl::StrCat("AmendRun is for between two steps, and step ", machine.step(), " of run '", spec_.run_id,
                     "' is open: call it when every rank has the step's result, and before any begins the next"));
  }
  if (followers_ != nullptr && followers_->weights().tags_in_memory() > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run '", spec_.run_id, "' has ", followers_->weights().tags_in_memory(),
        " versions with names in memory, which would go "
        "with the run as it is: pull what is to be kept, untag them, and amend it then. With storage.dir they stay"));
  }
  if (loader_->loaded()) return absl::OkStatus();
  if (machine.step() > 1 || gate.lacks_added()) return gate.lacking();
  return absl::FailedPreconditionError(absl::StrCat(
      "run '", spec_.run_id, "' has no weights yet; a trainer sends them with LoadState, and then it can be amended"));
}

void Run::Hold(SessionId session, absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, session, done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    if (auto s = CheckHold(session); !s.ok()) return done(s);
    driver_->WhenQuiet([this, session, done = std::move(done)](absl::Status s) mutable {
      if (s.ok()) s = CheckHold(session);
      if (s.ok()) {
        held_ = true;
        driver_->HoldSteps(true);
      }
      done(std::move(s));
    });
  });
}

void Run::Release() {
  Post([this] {
    held_ = false;
    if (!ended_ && !closed_) driver_->HoldSteps(false);
  });
}

absl::StatusOr<Run::Taken> Run::TakeOver(Run* past) {
  ASSIGN_OR_RETURN(Heritage heritage, past->HandOver());
  Taken taken{.snapshots_dropped = heritage.status.snapshots};
  PostAndWait([&] {
    Inherit(std::move(heritage));
    taken.step = driver_->machine().step() - 1;
    taken.generation = driver_->machine().generation();
  });
  return taken;
}

absl::StatusOr<Run::Heritage> Run::HandOver() {
  absl::Status status;
  Heritage heritage;
  PostAndWait([&] {
    status = ended_ || closed_ ? Gone() : driver_->EndSessions();
    if (!status.ok()) return;
    heritage.steps = driver_->executor().past();
    heritage.status = board_.Read();
    heritage.layers = layers_.names();
    amended_ = true;
    Dismiss(BeingAmended());
  });
  RETURN_IF_ERROR(status);
  uint64_t freed = 0;
  heritage.store = EndWhenIdle(&freed);
  strand_.Stop();
  return heritage;
}

void Run::Inherit(Heritage heritage) {
  store_->TakeOver(heritage.store.get());
  // They are told by their numbers; with more than limits.layer_groups the last of them is another.
  const std::vector<std::string>& layers = layers_.names();
  const bool same_layers = heritage.layers.size() <= layers.size() &&
                           std::equal(heritage.layers.begin(), heritage.layers.end(), layers.begin());
  driver_->GoOnFrom(std::move(heritage.steps));
  // What is on the disk is of the spec before.
  driver_->executor().OnReplaced();
  if (Checkpointer* const checkpointer = driver_->executor().checkpointer()) {
    const uint64_t durable = heritage.status.durability ? heritage.status.durability->durable_step : 0;
    checkpointer->set_durable_step(durable);
    metrics_->OnDurable(durable);
  }
  loader_->GoOnFrom(kept_);
  if (followers_ != nullptr) followers_->weights().LoadTags();
  RunStatus& past = heritage.status;
  board_.Write([&](RunStatus& s) {
    past.ranks = std::move(s.ranks);
    past.state = s.state;
    past.awaited.clear();
    if (!same_layers) past.layers.clear();
    past.weights_loaded = s.weights_loaded;
    past.bytes = LiveBytes();
    past.follow = std::move(s.follow);
    past.generation = driver_->machine().generation();
    past.snapshots.clear();
    past.unattended_since_s = unattended_since_s_;
    s = std::move(past);
  });
  metrics_->OnSnapshots(0);
  ShowState();
}

}  // namespace ballast
