// The stream's side of the step runner: how a stream ends, by whom, and what the rank looks like from outside.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/run/step_runner.h"

namespace ballast {
namespace {

// How long a peer that does not read may delay the end of its own stream.
constexpr double kLeaveS = 1;

}  // namespace

std::optional<uint32_t> StepRunner::RankOf(const RankStream* stream) const {
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    if (links_[rank].stream.get() == stream) return rank;
  }
  return std::nullopt;
}

void StepRunner::OnWritten(const RankStream* stream) {
  for (Link& link : links_) link.sender->OnWritten(stream);
  Settle();
}

void StepRunner::OnInputClosed(const RankStream* stream) {
  const auto rank = RankOf(stream);
  if (!rank) return;
  links_[*rank].input_closed = true;
  Settle();
}

void StepRunner::OnStreamGone(const RankStream* stream) {
  std::erase_if(leaving_, [&](const Leaving& l) { return l.stream.get() == stream; });
  const auto rank = RankOf(stream);
  if (!rank) return;
  const SessionId session = links_[*rank].session;
  Detach(*rank, absl::CancelledError("the connection was lost"));
  Execute(machine_.Handle(event::StreamClosed{session, /*clean=*/false}, MonotonicSeconds())).IgnoreError();
  ShowRanks();
  Settle();
}

void StepRunner::Tick() {
  const double now_s = MonotonicSeconds();
  for (const Leaving& l : leaving_) {
    if (now_s >= l.cancel_at_s) l.stream->Cancel();
  }
  LogExpiredLeases(now_s);
  Execute(machine_.Handle(event::Tick{}, now_s)).IgnoreError();  // a tick is never refused
  Settle();
}

void StepRunner::Drain(std::function<void()> done) {
  draining_ = true;
  drained_ = std::move(done);
  for (Link& link : links_) link.sender->Drain("the daemon is shutting down");
  Settle();
}

void StepRunner::End(absl::Status status) {
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    if (links_[rank].stream != nullptr) Detach(rank, status);
  }
  for (DueRewind& due : std::exchange(rewinds_due_, {})) due.done(status);
}

// The session stays: its client may come back with the token.
void StepRunner::EndStream(uint32_t rank, absl::Status status) {
  Link& link = links_[rank];
  if (link.stream == nullptr) return;
  const SessionId session = link.session;
  Detach(rank, std::move(status));
  Execute(machine_.Handle(event::StreamClosed{session, /*clean=*/false}, MonotonicSeconds())).IgnoreError();
  ShowRanks();
}

// Of a stream that is over: its memory goes with it, what it brought stays. Once in a while, so that it may allocate.
void StepRunner::KeepHeld(Link* link) {
  for (auto& [id, payload] : link->held) payload.Keep();
}

void StepRunner::Detach(uint32_t rank, absl::Status status) {
  Link& link = links_[rank];
  LogEnd(rank, status);
  link.stream->Finish(std::move(status));
  leaving_.push_back({link.stream, MonotonicSeconds() + kLeaveS});
  link.sender->Unbind();
  link.parked.clear();
  KeepHeld(&link);
  link.stream.reset();
}

bool StepRunner::AnyRankHeld() const {
  const double now_s = MonotonicSeconds();
  for (uint32_t rank = 0; rank < machine_.world(); ++rank) {
    const bool resumable = now_s < machine_.disconnected_at_s(rank) + environment_.spec->lease_s;
    if (machine_.session(rank) && (machine_.connected(rank) || resumable)) return true;
  }
  return false;
}

// After whatever happened.
void StepRunner::Settle() {
  CarryOutRewinds();
  // What one rank brings makes room for another.
  for (bool more = true; more;) {
    more = false;
    for (uint32_t rank = 0; rank < links_.size(); ++rank) {
      const size_t before = links_[rank].parked.size();
      TakeParked(rank);
      more = more || links_[rank].parked.size() != before;
    }
  }
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    RefuseStuck(rank);
    OfferWanted(rank);
    links_[rank].sender->Pump();
    FinishWhenDone(rank);
  }
  SaveInIdleTime();
  FinishWhenDrained();
}

// A rank whose next chunk may find no credit is told which one sums wait for.
void StepRunner::OfferWanted(uint32_t rank) {
  Link& link = links_[rank];
  const RunSpec& spec = *environment_.spec;
  const uint64_t chunk_bytes = spec.chunk_elements * sizeof(float);
  if (link.stream == nullptr) return;
  const bool short_of_credit = link.held_bytes + chunk_bytes > spec.credit_bytes || link.stream->full();
  if (const auto wanted = machine_.Offer(rank, short_of_credit)) link.sender->Want(*wanted);
}

// Ends the stream of a client that has nothing more to say once all it is owed has been written.
void StepRunner::FinishWhenDone(uint32_t rank) {
  const Link& link = links_[rank];
  if (link.stream == nullptr || !link.input_closed || !link.parked.empty() || updating_ > 0 || !link.sender->idle()) {
    return;
  }
  if (machine_.InStep(rank) && machine_.Ended(rank)) return;  // it waits for the other ranks
  if (machine_.InStep(rank)) {
    return EndStream(rank, absl::FailedPreconditionError(
                               absl::StrCat("the client ended the stream with step ", machine_.step(), " open")));
  }
  const SessionId session = link.session;
  Detach(rank, absl::OkStatus());
  Execute(machine_.Handle(event::StreamClosed{session, /*clean=*/true}, MonotonicSeconds())).IgnoreError();
  links_[rank].peer.clear();
  ShowRanks();
}

// Of a daemon that may not begin another step.
void StepRunner::FinishWhenDrained() {
  if (!draining_ || machine_.step_open() || updating_ > 0) return;
  bool all_gone = true;
  for (uint32_t rank = 0; rank < links_.size(); ++rank) {
    if (links_[rank].stream != nullptr && links_[rank].sender->idle()) {
      EndStream(rank, absl::UnavailableError("the daemon is shutting down"));
    }
    all_gone = all_gone && links_[rank].stream == nullptr;
  }
  if (all_gone && drained_) std::exchange(drained_, nullptr)();
}

void StepRunner::ShowRanks() {
  std::vector<RankStatus> ranks;
  uint32_t connected = 0;
  for (uint32_t rank = 0; rank < machine_.world(); ++rank) {
    connected += machine_.connected(rank) ? 1 : 0;
    ranks.push_back({.peer = machine_.session(rank) ? links_[rank].peer : "",
                     .lane = links_[rank].lane,
                     .connected = machine_.connected(rank),
                     .disconnected_at_s = machine_.disconnected_at_s(rank)});
  }
  environment_.metrics->OnRanks(connected, std::max<uint32_t>(machine_.world(), 1));
  environment_.board->Write([&](RunStatus& s) {
    s.ranks = std::move(ranks);
    s.generation = machine_.generation();
  });
}

}  // namespace ballast
