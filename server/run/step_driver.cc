#include "server/run/step_driver.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "server/base/clock.h"

namespace ballast {

StepDriver::StepDriver(StepExecutor::Environment environment)
    : spec_(environment.spec), executor_(std::move(environment), [this] { due_ = true; }), links_(executor_.links()) {}

StepExecutor::AttachOutcome StepDriver::Attach(const event::Attach& attach, const std::string& peer) {
  std::string holder;
  if (attach.rank < machine().world()) {
    holder = absl::StrCat("rank ", attach.rank, " of run '", spec_->run_id, "' is held by ", links_[attach.rank].peer(),
                          machine().connected(attach.rank) ? "" : " (connection lost)", ": ");
  }
  StepExecutor::AttachOutcome outcome = executor_.Attach(attach);
  if (absl::IsAlreadyExists(outcome.status)) {
    outcome.status = absl::AlreadyExistsError(absl::StrCat(holder, outcome.status.message()));
  }
  if (outcome.status.ok()) links_[outcome.rank].set_peer(peer);
  if (outcome.status.ok() && !outcome.resumed) links_[outcome.rank].outbox().Receive(attach.coverage.receives);
  if (outcome.resumed) LeaveOldStream(outcome.rank);
  executor_.ShowRanks();
  Settle();
  return outcome;
}

absl::Status StepDriver::CheckUnattended() const {
  constexpr absl::string_view kFix = "stop it first, or delete with force";
  const double now_s = MonotonicSeconds();
  std::vector<std::string> attached;
  std::string returning;
  for (uint32_t rank = 0; rank < machine().world(); ++rank) {
    const std::string& peer = links_[rank].peer();
    if (machine().held(rank, now_s)) attached.push_back(peer);
    const auto since_s = machine().returning_since_s(rank, now_s);
    if (!since_s || !returning.empty()) continue;
    const std::string who = peer.empty() ? "" : absl::StrCat(" (", peer, ")");
    returning = absl::StrFormat("rank %d%s has not come back since the rewind %.0f s ago", rank, who, now_s - *since_s);
  }
  if (!attached.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("run '", spec_->run_id, "' has a trainer attached (", absl::StrJoin(attached, ", "), "); ", kFix));
  }
  if (returning.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("run '", spec_->run_id, "': ", returning, "; ", kFix));
}

void StepDriver::OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened) {
  if (auto refusal = executor_.OpenStream(stream, opened); !refusal.ok()) {
    stream->Finish(refusal);
    return executor_.reporter().LogRefused(*stream, refusal);
  }
  Settle();
}

void StepDriver::OnMessages(const std::shared_ptr<RankStream>& stream, std::vector<RankMessage> messages) {
  const auto rank = links_.RankOf(stream.get());
  if (!rank) return;
  for (RankMessage& message : messages) links_[*rank].Park(std::move(message));
  due_ = true;
}

void StepDriver::OnWritten(const RankStream* stream) {
  for (RankLink& link : links_) link.outbox().OnWritten(stream);
  due_ = true;
}

void StepDriver::SettleIfDue() {
  while (due_) Settle();
}

void StepDriver::OnInputClosed(const RankStream* stream) {
  const auto rank = links_.RankOf(stream);
  if (!rank) return;
  links_[*rank].OnInputClosed();
  Settle();
}

void StepDriver::OnStreamGone(const RankStream* stream) {
  const auto rank = links_.RankOf(stream);
  if (rank) EndStream(*rank, absl::CancelledError("the connection was lost"));
  for (RankLink& link : links_) link.OnGone(stream);  // nothing more comes of it, and it is let go
  if (rank) Settle();
}

void StepDriver::Tick() {
  const double now_s = MonotonicSeconds();
  for (RankLink& link : links_) link.CancelLate(now_s);
  for (uint32_t rank = 0; rank < machine().world(); ++rank) {
    executor_.reporter().LogLeaseIfOver(rank, links_[rank].peer(), now_s);
  }
  executor_.Handle(event::Tick{}).IgnoreError();  // never refused
  due_ = true;
  SettleIfDue();
}

void StepDriver::ShowAwaited() { executor_.reporter().ShowAwaited(executor_.machine().Awaited()); }

void StepDriver::Rewind(RewindOrder order, RewindDone done) {
  executor_.rewinder().Ask(std::move(order), std::move(done));
  if (!executor_.executing()) Settle();  // else what follows the effects does
}

void StepDriver::Drain(std::function<void()> done) {
  executor_.gate().Drain();
  drained_ = std::move(done);
  for (RankLink& link : links_) link.outbox().Drain("the daemon is shutting down");
  Settle();
}

void StepDriver::set_weights_loaded(bool loaded) {
  executor_.gate().set_weights_loaded(loaded);
  for (RankLink& link : links_) link.outbox().Hold(!loaded);
}

void StepDriver::WhenQuiet(absl::AnyInvocable<void(absl::Status)> done) {
  quiet_.push_back(std::move(done));
  Settle();
}

void StepDriver::AnswerQuiet() {
  if (quiet_.empty() || !executor_.updater().idle()) return;
  if (!machine().step_open() && executor_.gate().weights_loaded() &&
      (links_.any_sending() || executor_.holds_results()))
    return;
  for (auto& done : std::exchange(quiet_, {})) done(absl::OkStatus());
}

void StepDriver::BeginReplacement() {
  executor_.gate().set_replacing(true);
  for (uint32_t i = 0; i < spec_->tensors.size(); ++i) executor_.rewinder().BeforeUpdate(i);
}

void StepDriver::EndReplacement(bool whole) {
  executor_.gate().set_replacing(false);
  if (whole) executor_.OnReplaced();
  if (whole) executor_.Handle(event::Rewind{machine().step() - 1}).IgnoreError();  // between two steps never refused
  executor_.ShowRanks();
  executor_.reporter().LogReplaced(whole);
  Settle();
}

void StepDriver::HoldSteps(bool held) {
  executor_.gate().set_replacing(held);
  if (!held) Settle();
}

void StepDriver::Checkpoint(CheckpointTrigger trigger, Checkpointer::Done done) {
  if (executor_.checkpointer() == nullptr) {
    return done(absl::FailedPreconditionError(
        absl::StrCat("run '", spec_->run_id, "' is not checkpointed: the daemon has no storage (storage.dir)")));
  }
  if (!executor_.last_result()) {
    return done(absl::FailedPreconditionError(
        absl::StrCat("run '", spec_->run_id, "' has closed no step yet: there is nothing to checkpoint")));
  }
  executor_.checkpointer()->set_closed(executor_.last_result()->step);
  executor_.checkpointer()->Ask(trigger, std::move(done));
  Settle();
}

void StepDriver::WriteLast(std::string why, absl::AnyInvocable<void(absl::Status)> done) {
  ends_ = std::move(why);
  CloseTorn();
  Settle();  // a torn step may be gone back from
  const auto last = executor_.last_result();
  const bool written = !last || executor_.DurableStep() >= last->step;
  if (executor_.checkpointer() == nullptr || !last || (written && !executor_.gate().weights_loaded())) {
    ends_.clear();
    return done(absl::OkStatus());
  }
  if (!executor_.gate().weights_loaded()) {
    ends_.clear();
    return done(executor_.gate().lacking());
  }
  Checkpoint(CheckpointTrigger::kDrain,
             [this, done = std::move(done)](const absl::StatusOr<CheckpointWritten>& result) mutable {
               ends_.clear();
               due_ = true;
               done(result.status());
             });
}

void StepDriver::CloseTorn() {
  if (ends_.empty() || !machine().step_open() || !machine().UpdatedAny()) return;
  executor_.Handle(event::Stop{ends_}).IgnoreError();  // never refused
  due_ = true;
}

void StepDriver::End(const absl::Status& status) {
  for (auto& done : std::exchange(quiet_, {})) done(status);
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    if (links_[rank].open()) executor_.Detach(rank, status);
  }
  executor_.rewinder().End(status);
  if (executor_.checkpointer() != nullptr) executor_.checkpointer()->End(status);
  executor_.End();
}

void StepDriver::TakeParked(uint32_t rank) {
  RankLink& link = links_[rank];
  while (link.parked() != nullptr && link.open() && !MustWait(link, *link.parked())) {
    const auto stream = link.stream();
    RankMessage message = link.Unpark();
    if (auto s = executor_.Take(rank, message); !s.ok()) EndStream(rank, std::move(s));
    stream->Consumed();
  }
}

bool StepDriver::MustWait(const RankLink& link, const RankMessage& message) const {
  if (const auto* begin = std::get_if<message::MicroBegin>(&message)) {
    return machine().MustWait({link.session(), begin->micro, begin->last});
  }
  if (std::holds_alternative<message::StepBegin>(message)) {
    return executor_.gate().replacing() || !ends_.empty() || executor_.MustWaitToBegin();
  }
  const auto* gradient = std::get_if<message::Gradient>(&message);
  return gradient != nullptr && !link.HasRoomFor(gradient->data.size());
}

// Nothing else can make room for a rank that sums wait for.
void StepDriver::RefuseStuck(uint32_t rank) {
  const RankLink& link = links_[rank];
  if (link.parked() == nullptr || !executor_.updater().idle() || !machine().InStep(rank)) return;
  if (!std::holds_alternative<message::Gradient>(*link.parked())) return;
  const auto wanted = executor_.machine().Wanted(rank);
  if (!wanted) return;
  EndStream(rank, absl::ResourceExhaustedError(absl::StrCat(
                      link.held_bytes(),
                      " bytes of gradients wait to be summed, and more were sent without credit, but not chunk ",
                      wanted->chunk, " of tensor '", spec_->tensors[wanted->tensor].name,
                      "', which sums wait for; heed AttachResponse.credit_bytes and Credit")));
}

// A rank whose next chunk may find no credit is told which one sums wait for; not while some of its credit is on its way
// back from a device.
void StepDriver::OfferWanted(uint32_t rank) {
  RankLink& link = links_[rank];
  if (!link.open() || link.summing()) return;
  if (const auto wanted = executor_.machine().Offer(rank, link.ShortOfCredit())) link.outbox().Want(*wanted);
}

// Its own client left it; nobody reads what it would still say, and what it still brings comes again.
void StepDriver::LeaveOldStream(uint32_t rank) {
  RankLink& link = links_[rank];
  link.PromiseHeld();
  executor_.reporter().metrics().OnReconnect(rank);
  if (!link.open()) return;
  link.stream()->Cancel();
  EndStream(rank, absl::AbortedError("its client attached again"));
}

// The session stays: its client may come back with the token.
void StepDriver::EndStream(uint32_t rank, absl::Status status) {
  if (!links_[rank].open()) return;
  const SessionId session = links_[rank].session();
  executor_.Detach(rank, std::move(status));
  executor_.Handle(event::StreamClosed{session, /*clean=*/false}).IgnoreError();
  executor_.ShowRanks();
}

void StepDriver::Settle() {
  due_ = false;
  executor_.KeepClosed();
  if (!executor_.judge().awaits_answers()) executor_.rewinder().CarryOut();  // a step that is being judged comes first
  // What one rank brings makes room for another.
  for (bool more = true; more;) {
    more = false;
    for (uint32_t rank = 0; rank < links_.size(); ++rank) {
      const size_t before = links_[rank].parked_messages();
      TakeParked(rank);
      more = more || links_[rank].parked_messages() != before;
    }
  }
  CloseTorn();
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    RefuseStuck(rank);
    OfferWanted(rank);
    links_[rank].outbox().Pump();
    FinishWhenDone(rank);
  }
  executor_.CheckpointIfWanted();
  executor_.MakeVersionIfWanted();
  // When no stream and no update waits for the devices.
  const bool idle = executor_.updater().idle(), sends = links_.any_sending();
  if (idle && !sends) executor_.rewinder().SaveNext([this] { Settle(); });
  if (idle) executor_.EncodeVersion(/*idle=*/!sends, [this] { Settle(); });
  AnswerQuiet();
  FinishWhenDrained();
}

// Ends the stream of a client that has nothing more to say once all it is owed has been written.
void StepDriver::FinishWhenDone(uint32_t rank) {
  RankLink& link = links_[rank];
  if (!link.finished() || !executor_.updater().idle() || executor_.holds_results()) return;
  if (machine().InStep(rank) && machine().Ended(rank)) return;  // it waits for the other ranks
  if (machine().InStep(rank)) {
    return EndStream(rank, absl::FailedPreconditionError(
                               absl::StrCat("the client ended the stream with step ", machine().step(), " open")));
  }
  const SessionId session = link.session();
  executor_.Detach(rank, absl::OkStatus());
  executor_.Handle(event::StreamClosed{session, /*clean=*/true}).IgnoreError();
  link.set_peer("");
  executor_.ShowRanks();
}

// The daemon may not begin another step.
void StepDriver::FinishWhenDrained() {
  if (!executor_.gate().draining() || machine().step_open() || !executor_.updater().idle()) return;
  if (executor_.holds_results()) return;
  bool all_gone = true;
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    if (links_[rank].open() && !links_[rank].sending()) {
      EndStream(rank, absl::UnavailableError("the daemon is shutting down"));
    }
    all_gone = all_gone && !links_[rank].open();
  }
  if (all_gone && drained_) std::exchange(drained_, nullptr)();
}

}  // namespace ballast
