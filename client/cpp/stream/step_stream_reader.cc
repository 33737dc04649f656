// The reader's half of StepStream: opening, reading, and coming back after a lost connection.
//
// The daemon's answer to Attach (chunks held, step open or closed) and Open (weights received) decide what a resumed
// stream must carry, never what was sent before: a message that was written may or may not have arrived.

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/bitmap.h"
#include "proto/rewound.h"
#include "proto/session_over.h"

#include "client/cpp/stream/session.h"
#include "client/cpp/stream/step_stream.h"
#include "client/cpp/transport/retry.h"

namespace ballast {
namespace {

// For a session's digests the daemon makes a pass over all weights.
constexpr absl::Duration kDigestTimeout = absl::Seconds(120);

// Whether asking again may help.
bool MayPass(const absl::Status& status) { return IsLost(status) || RetryAfter(status); }

}  // namespace

void StepStream::Read(v1::AttachResponse grant) {
  std::optional<absl::Time> put_off_since;
  for (absl::Time granted = SteadyNow();; granted = SteadyNow()) {
    const absl::Duration renews = grant.lease_s() > 0 ? absl::Seconds(grant.lease_s() / 3) : absl::InfiniteDuration();
    Ending end = Serve(grant);
    // What Attach has granted holds for the lease. Another Attach is one more of the calls that may be too many.
    while (!end.opened && WaitPutOff(end.status, renews, &put_off_since)) {
      end.lost = SteadyNow() - granted >= renews;
      if (end.lost) break;
      end = Serve(grant);
    }
    if (end.opened) put_off_since.reset();
    absl::StatusOr<v1::AttachResponse> next = end.lost ? Resume(end.status) : end.status;
    if (!next.ok()) {
      Fail(Explain(next.status()));
      {
        absl::MutexLock lock(&mu_);
        reader_done_ = true;
      }
      if (grant.takes_keepalives() && RewoundTo(next.status())) KeepAlive(renews);
      return;
    }
    grant = *std::move(next);
  }
}

void StepStream::KeepAlive(absl::Duration every) {
  const auto say = [this](const std::string& token, grpc::ClientContext* context) {
    return ballast::KeepAlive(connection_, options_, token, context);
  };
  for (absl::Status said; said.ok() || MayPass(said); said = Ask(every, say)) {
    absl::MutexLock lock(&mu_);
    if (mu_.AwaitWithTimeout(absl::Condition(&leaving_), every)) return;
  }
}

absl::Status StepStream::Ask(absl::Duration within,
                             absl::FunctionRef<absl::Status(const std::string&, grpc::ClientContext*)> ask) {
  auto context = std::make_shared<grpc::ClientContext>();
  std::string token;
  {
    absl::MutexLock lock(&mu_);
    if (leaving_) return absl::CancelledError("the client was closed");
    asking_ = context;
    token = token_;
  }
  context->set_deadline(absl::ToChronoTime(absl::Now() + within));
  const absl::Status answer = ask(token, context.get());
  absl::MutexLock lock(&mu_);
  asking_ = nullptr;
  return answer;
}

// Explains that the session has ended although no other process took the rank over: a trainer started again takes it.
absl::Status StepStream::Explain(const absl::Status& why) const {
  if (!IsSessionOver(why)) return why;
  return absl::UnavailableError(absl::StrCat(
      "rank ", options_.rank, " of run '", options_.run_id, "' was away from the daemon at ", connection_.server(),
      " for longer than the run waits (the daemon's lease and rank_timeout), in step ", step(),
      ", and its session is over: the run goes on without it, or waits for it. To take the rank again, start this "
      "trainer again, with the daemon's weights"));
}

StepStream::Ending StepStream::Serve(const v1::AttachResponse& grant) {
  auto call = std::make_shared<Call>();
  auto transport = open_transport_(grant);
  v1::TrainRequest request;
  {
    absl::MutexLock lock(&mu_);
    if (!transport.ok()) return {.status = transport.status(), .lost = opened_once_ && IsLost(transport.status())};
    if (!status_.ok()) return {.status = status_};  // it leaves its rank to another
    if (attach_again_) return {.status = absl::CancelledError("attaching again"), .lost = true};
    call->transport = *std::move(transport);
    if (auto s = Adopt(grant, request.mutable_open()); !s.ok()) return {.status = s};
    call_ = call;
    half_closed_ = false;
    opened_by_ = absl::Now() + absl::Seconds(connection_.options().connect_timeout_s);
  }
  call->transport->Start(request);
  v1::TrainResponse response;
  absl::Span<const std::byte> data;
  absl::Status refused;
  while (refused.ok() && call->transport->Read(&response, &data)) {
    refused = Handle(response, data, call->transport->reads_on_gpu());
  }
  return Hang(*call, refused);
}

// Ends a stream that is no longer read, once the writer has let go of it.
StepStream::Ending StepStream::Hang(Call& call, absl::Status refused) {
  if (!refused.ok()) {
    call.transport->Cancel();
    v1::TrainResponse rest;
    absl::Span<const std::byte> data;
    while (call.transport->Read(&rest, &data)) continue;
  }
  bool left = false, opened = false;
  {
    absl::MutexLock lock(&mu_);
    opened = opened_by_ == absl::InfiniteFuture();
    if (!opened) retry_.away += SteadyNow() - call.began;
    open_ = false;
    opened_by_ = absl::InfiniteFuture();
    const auto idle = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !writing_; };
    mu_.Await(absl::Condition(&idle));
    try {
      if (step_) step_->LeaveRooms(&memory_);
      refused.Update(memory_.status());  // what was copied may be anything, and must not be sent again
    } catch (const std::bad_alloc&) {
      refused = absl::ResourceExhaustedError("there is no host memory for the gradients that must be sent again");
    }
    call_ = nullptr;
    left = leaving_;
    refused.Update(status_);  // of a client that has failed: its session is not resumed
  }
  const absl::Status status = call.transport->Finish();
  if (!refused.ok()) return {.status = refused};
  if (left && !RewoundTo(status)) return Closed(status);
  if (status.ok()) return {.status = absl::UnavailableError("the daemon ended the stream"), .lost = true};
  return {.status = status, .lost = IsLost(status), .opened = opened};
}

StepStream::Ending StepStream::Closed(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  goodbye_heard_ = status.ok();
  return {.status = absl::CancelledError("the client was closed")};
}

absl::Status StepStream::Adopt(const v1::AttachResponse& grant, v1::Open* open) {
  if (leaving_) return absl::CancelledError("the client was closed");
  if (grant.chunk_elements() != tensors_.chunk_elements()) {
    return absl::InternalError(absl::StrCat("the daemon cut chunks of ", tensors_.chunk_elements(),
                                            " elements before and of ", grant.chunk_elements(), " now"));
  }
  token_ = grant.session_token();
  open->set_session_token(token_);
  open->set_takes_small_weights(true);
  measures_steps_ = grant.measures_steps();
  credit_ = CreditWindow(grant.credit_bytes(), grant.credit_held());
  // Where there are several ranks, steps may have closed without this one.
  if (step_) {
    if (auto s = step_->Resume(grant, open); !s.ok()) return s;
    closed_elsewhere_ = std::max(closed_elsewhere_, grant.resume_step() - 1);
    return absl::OkStatus();
  }
  if (step_number_ == 0 || (options_.world > 1 && grant.resume_step() > step_number_)) {
    step_number_ = grant.resume_step();
  } else if (grant.resume_step() != step_number_) {
    return absl::FailedPreconditionError(absl::StrCat("the next step here is ", step_number_, ", but the daemon is at ",
                                                      grant.resume_step(), "; attach again and pull the weights"));
  } else {
    open->set_weights_step(step_number_ - 1);
    open->set_weights_received(PackBits(std::vector<bool>(tensors_.size(), true)));
  }
  return absl::OkStatus();
}

absl::Status StepStream::Handle(const v1::TrainResponse& response, absl::Span<const std::byte> data, bool on_gpu) {
  switch (response.message_case()) {
    case v1::TrainResponse::kOpened:
      return OnOpened(response.opened());
    case v1::TrainResponse::kWeights:
      return OnWeights(response.weights(), data, on_gpu);
    case v1::TrainResponse::kSmallWeights:
      return OnSmallWeights(response.small_weights());
    case v1::TrainResponse::kStepResult:
      return OnResult(response.step_result());
    case v1::TrainResponse::kCredit:
      return OnCredit(response.credit());
    case v1::TrainResponse::kStepMeasured:
      return OnMeasured(response.step_measured());
    case v1::TrainResponse::kDrain: {
      absl::MutexLock lock(&mu_);
      drain_reason_ = response.drain().reason();
      return absl::OkStatus();
    }
    case v1::TrainResponse::kBatch:
    case v1::TrainResponse::MESSAGE_NOT_SET:
      return absl::OkStatus();  // of a newer daemon
  }
  return absl::OkStatus();
}

absl::Status StepStream::OnOpened(const v1::Opened& opened) {
  std::string line;
  {
    absl::MutexLock lock(&mu_);
    open_ = true;
    takes_small_gradients_ = opened.takes_small_gradients();
    opened_once_ = true;
    opened_by_ = absl::InfiniteFuture();
    drain_reason_.clear();
    if (!lost_at_) return absl::OkStatus();
    line = absl::StrFormat("connected to the daemon at %s again after %.1f s; ", connection_.server(),
                           absl::ToDoubleSeconds(SteadyNow() - *lost_at_));
    if (step_ && closed_elsewhere_ > step_number_) {
      absl::StrAppend(&line, "steps ", step_number_, " to ", closed_elsewhere_, " closed meanwhile");
    } else {
      absl::StrAppend(&line, "step ", step_number_, " goes on");
    }
    lost_at_.reset();
  }
  connection_.Log(line);
  return absl::OkStatus();
}

absl::Status StepStream::OnResult(const v1::StepResult& result) {
  std::shared_ptr<OpenStep> done;
  FreedChunks freed(&memory_);
  {
    absl::MutexLock lock(&mu_);
    if (step_ && step_->number() < result.step() && !step_->has_result()) {  // they come in order
      return absl::UnavailableError(absl::StrCat("the daemon at ", connection_.server(), " keeps no result of step ",
                                                 step_->number(), ", which is open here, and is past step ",
                                                 result.step(),
                                                 ": start this trainer again, with the daemon's weights"));
    }
    if (!step_ || step_->number() != result.step()) {
      closed_elsewhere_ = std::max(closed_elsewhere_, result.step());  // before this rank began it, or repeated
      return absl::OkStatus();
    }
    if (auto s = step_->SetResult(result, freed.get()); !s.ok()) return s;
    Release(freed.get());
    Progress();
    if (step_->done()) done = TakeStep();
  }
  if (done) done->Finish(done->result(absl::Now()));
  return absl::OkStatus();
}

absl::Status StepStream::OnCredit(const v1::Credit& credit) {
  FreedChunks freed(&memory_);  // outlives the lock
  absl::MutexLock lock(&mu_);
  credit_.Return(credit.bytes());
  if (step_) step_->Acknowledge(credit.acknowledged(), freed.get());
  Release(freed.get());
  if (credit.has_wanted() && step_) {
    step_->Want({credit.wanted().micro(), credit.wanted().tensor(), credit.wanted().chunk()});
  }
  Progress();
  return absl::OkStatus();
}

absl::Status StepStream::OnMeasured(const v1::StepMeasured& measured) {
  absl::MutexLock lock(&mu_);
  if (step_ && step_->number() == measured.step()) step_->SetMeasured(measured);  // else of one that is over
  Progress();
  return absl::OkStatus();
}

bool StepStream::WaitToAsk(absl::Duration pause) {
  constexpr absl::Duration kGlance = absl::Milliseconds(20);  // at whether the client is closed
  const absl::Time until = SteadyNow() + pause;
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (leaving_ || !status_.ok()) return false;
    }
    const absl::Duration left = until - SteadyNow();
    if (left <= absl::ZeroDuration()) return true;
    connection_.WaitConnecting(std::min(left, kGlance));
  }
}

bool StepStream::WaitPutOff(const absl::Status& why, absl::Duration most, std::optional<absl::Time>* since) {
  if (!IsPutOff(why)) return false;
  const auto stated = RetryAfter(why);
  const absl::Time now = SteadyNow();
  if (!*since) {
    *since = now;
    connection_.Log(absl::StrFormat("rank %d of run '%s': the daemon at %s puts its stream off (%s)", options_.rank,
                                    options_.run_id, connection_.server(), why.message()));
  }
  return now + *stated <= **since + kBusyPatience && WaitToAsk(std::min(Spread(*stated), most));
}

absl::StatusOr<v1::AttachResponse> StepStream::Resume(const absl::Status& why) {
  const absl::Time began = SteadyNow();
  const absl::Duration without = absl::Seconds(connection_.options().reconnect_timeout_s);  // a connection
  absl::Duration allowed = without;
  bool announce = false, put_off = IsPutOff(why);
  Retry retry;
  {
    absl::MutexLock lock(&mu_);
    retry = retry_;
    announce = !lost_at_ && !put_off;
    if (announce) lost_at_ = began;
  }
  std::string reason = ConnectionReason(std::string(why.message()));
  absl::Duration stated;  // by the daemon
  if (announce) {
    connection_.Log(absl::StrFormat("lost the daemon at %s (%s); trying again for %.4g s", connection_.server(), reason,
                                    connection_.options().reconnect_timeout_s));
  }
  for (;; ++retry.attempts) {
    const absl::Duration away = retry.away + (SteadyNow() - began);
    const absl::Duration pause = std::min(std::max(Backoff(retry.attempts), stated), allowed - away);
    if (!WaitToAsk(pause)) return absl::CancelledError("the client was closed");
    {
      absl::MutexLock lock(&mu_);
      if (!drain_reason_.empty()) reason = absl::StrCat("it shut down: ", drain_reason_);
    }
    if (away + pause >= allowed) break;
    absl::StatusOr<v1::AttachResponse> grant = AskOnce(allowed - away - pause);
    if (grant.ok()) {
      absl::MutexLock lock(&mu_);
      retry.away = put_off ? absl::ZeroDuration() : retry.away + (SteadyNow() - began);
      retry_ = {.attempts = retry.attempts + 1, .away = retry.away};
      return grant;
    }
    if (absl::IsNotFound(grant.status())) {
      grant = ExplainMissingRun(connection_, options_.run_id, attached_at_, grant.status());
    }
    if (!MayPass(grant.status())) return grant;
    put_off = IsPutOff(grant.status());
    allowed = put_off ? std::max(without, kBusyPatience) : without;
    stated = RetryAfter(grant.status()).value_or(absl::ZeroDuration());
    reason = ConnectionReason(std::string(grant.status().message()));
  }
  return absl::UnavailableError(absl::StrFormat(
      "lost the daemon at %s in step %d and could not get back to it within %.4g s (%s): see its log, or raise "
      "reconnect_timeout_s",
      connection_.server(), step(), absl::ToDoubleSeconds(allowed), reason));
}

absl::StatusOr<v1::AttachResponse> StepStream::AskOnce(absl::Duration timeout) {
  bool again = false;
  {
    absl::MutexLock lock(&mu_);
    again = attach_again_;
  }
  absl::StatusOr<v1::AttachResponse> grant;
  const auto resume = [&](const std::string& token, grpc::ClientContext* context) {
    grant = ResumeSession(connection_, options_, token, /*want_digests=*/again, context);
    return grant.status();
  };
  if (absl::Status s = Ask(again ? kDigestTimeout : timeout, resume); !s.ok()) return s;
  if (!again) return grant;
  absl::MutexLock lock(&mu_);
  attach_again_ = false;
  attached_again_ = *grant;
  return grant;
}

}  // namespace ballast
