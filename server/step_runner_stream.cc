// The stream's side of the step runner: how a stream ends, by whom, and what the rank looks like from outside.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/clock.h"
#include "server/step_runner.h"

namespace ballast {
namespace {

// How long a peer that does not read may delay the end of its own stream.
constexpr double kLeaveS = 1;

}  // namespace

void StepRunner::OnWritten(const RankStream* stream) {
  sender_.OnWritten(stream);
  Settle();
}

void StepRunner::OnInputClosed(const RankStream* stream) {
  if (stream != stream_.get()) return;
  input_closed_ = true;
  Settle();
}

void StepRunner::OnStreamGone(const RankStream* stream) {
  std::erase_if(leaving_, [&](const Leaving& l) { return l.stream.get() == stream; });
  if (stream != stream_.get()) return;
  const SessionId session = stream_session_;
  Detach(absl::CancelledError("the connection was lost"));
  Execute(machine_.Handle(event::StreamClosed{session, /*clean=*/false}, MonotonicSeconds())).IgnoreError();
  ShowRank();
  Settle();
}

void StepRunner::Tick() {
  const double now_s = MonotonicSeconds();
  for (const Leaving& l : leaving_) {
    if (now_s >= l.cancel_at_s) l.stream->Cancel();
  }
  Execute(machine_.Handle(event::Tick{}, now_s)).IgnoreError();  // a tick is never refused
  Settle();
}

void StepRunner::Drain(std::function<void()> done) {
  draining_ = true;
  drained_ = std::move(done);
  sender_.Drain("the daemon is shutting down");
  Settle();
}

void StepRunner::End(absl::Status status) {
  if (stream_ != nullptr) Detach(std::move(status));
}

// The session stays: its client may come back with the token.
void StepRunner::EndStream(absl::Status status) {
  if (stream_ == nullptr) return;
  const SessionId session = stream_session_;
  Detach(std::move(status));
  Execute(machine_.Handle(event::StreamClosed{session, /*clean=*/false}, MonotonicSeconds())).IgnoreError();
  ShowRank();
}

void StepRunner::Detach(absl::Status status) {
  stream_->Finish(std::move(status));
  leaving_.push_back({stream_, MonotonicSeconds() + kLeaveS});
  sender_.Unbind();
  parked_.clear();
  stream_.reset();
}

void StepRunner::Settle() {
  sender_.Pump();
  FinishWhenDone();
}

// Ends the stream of a client that has nothing more to say, or of a daemon that may not begin another step, once all it
// is owed has been written.
void StepRunner::FinishWhenDone() {
  const bool quiet = updating_ == 0 && parked_.empty() && sender_.idle();
  if (stream_ != nullptr && input_closed_ && quiet) {
    if (machine_.step_open()) {
      EndStream(absl::FailedPreconditionError(
          absl::StrCat("the client ended the stream with step ", machine_.step(), " open")));
    } else {
      const SessionId session = stream_session_;
      Detach(absl::OkStatus());
      Execute(machine_.Handle(event::StreamClosed{session, /*clean=*/true}, MonotonicSeconds())).IgnoreError();
      peer_.clear();
      ShowRank();
    }
  }
  if (!draining_ || machine_.step_open()) return;
  if (stream_ != nullptr && quiet) EndStream(absl::UnavailableError("the daemon is shutting down"));
  if (stream_ == nullptr && drained_) std::exchange(drained_, nullptr)();
}

void StepRunner::ShowRank() {
  environment_.metrics->OnRanks(machine_.connected() ? 1 : 0, 1);
  environment_.board->Write([&](RunStatus& s) {
    s.peer = machine_.session() ? peer_ : "";
    s.connected = machine_.connected();
    s.disconnected_at_s = machine_.disconnected_at_s();
  });
}

}  // namespace ballast
