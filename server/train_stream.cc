#include "server/train_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "server/convert.h"
#include "server/status_macros.h"

namespace ballast {

TrainStream* TrainStream::Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context) {
  std::shared_ptr<TrainStream> stream(new TrainStream(environment, context));
  stream->self_ = stream;
  stream->ReadOn();
  return stream.get();
}

TrainStream::TrainStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context)
    : environment_(environment), peer_(context->peer()), record_(environment.metrics, "Train"), context_(context) {
  environment_.metrics->OnStreams(1);
}

std::shared_ptr<Run> TrainStream::run() {
  absl::MutexLock lock(&mu_);
  return run_;
}

void TrainStream::ReadOn() {
  absl::MutexLock lock(&mu_);
  if (finished_ || reading_ || input_closed_ || unconsumed_ >= kMostUnconsumed) return;
  reading_ = true;
  StartRead(&request_);
}

void TrainStream::OnReadDone(bool ok) {
  const auto self = shared_from_this();
  std::shared_ptr<Run> bound;
  bool finished = false, cancelled = false;
  {
    absl::MutexLock lock(&mu_);
    cancelled = context_->IsCancelled();
    input_closed_ = !ok;
    bound = run_;
    finished = finished_;
    unconsumed_ += ok && bound != nullptr ? 1 : 0;
  }
  if (finished) return;
  if (bound == nullptr) {
    const absl::Status s =
        ok ? Bind(request_) : absl::InvalidArgumentError("the stream ended before its first message");
    if (!s.ok()) return Finish(s);
  } else if (ok) {
    bound->OnMessage(self, Convert(&request_));
  } else if (!cancelled) {
    bound->OnInputClosed(self);
  }
  {
    absl::MutexLock lock(&mu_);
    reading_ = false;  // request_ is free: the strand, too, may begin the next read
  }
  ReadOn();
}

absl::Status TrainStream::Bind(const v1::TrainRequest& request) {
  if (!request.has_open()) {
    return absl::FailedPreconditionError("the first message of a Train stream must be Open, with the token of Attach");
  }
  const auto session = environment_.sessions->Find(request.open().session_token());
  if (!session) return absl::NotFoundError("no session has this token; Attach first");
  ASSIGN_OR_RETURN(const std::shared_ptr<Run> found, environment_.runs->Find(session->run_id));
  event::StreamOpened opened;
  opened.session = session->id;
  opened.weights_step = request.open().weights_step();
  ASSIGN_OR_RETURN(opened.weights_received,
                   ToBits(request.open().weights_received(), found->spec().tensors.size(), "Open.weights_received"));
  {
    absl::MutexLock lock(&mu_);
    run_ = found;
  }
  found->OpenStream(shared_from_this(), std::move(opened));
  return absl::OkStatus();
}

RankMessage TrainStream::Convert(v1::TrainRequest* request) {
  const RunSpec& spec = run()->spec();
  const auto or_bad = [](auto converted) -> RankMessage {
    if (converted.ok()) return *std::move(converted);
    return message::Bad{converted.status()};
  };
  if (request->has_gradient()) return ConvertGradient(request->mutable_gradient());
  if (request->has_step_begin()) return or_bad(ToStepBegin(request->step_begin(), spec));
  if (request->has_micro_end()) return or_bad(ToMicroEnd(request->micro_end(), spec));
  if (request->has_step_end()) return or_bad(ToStepEnd(request->step_end(), spec));
  if (request->has_micro_begin()) {
    return message::MicroBegin{request->micro_begin().micro(), request->micro_begin().last()};
  }
  if (request->has_open()) return message::Bad{absl::FailedPreconditionError("Open came twice on one stream")};
  return message::Bad{absl::InvalidArgumentError("an empty message, or one of a later protocol")};
}

RankMessage TrainStream::ConvertGradient(v1::Gradient* gradient) {
  const auto bound = run();
  const auto refuse = [&](absl::string_view reason, absl::Status status) {
    bound->metrics().OnRejectedChunk(std::string(reason));
    return message::Bad{std::move(status)};
  };
  absl::string_view reason;
  if (absl::Status s = CheckGradient(*gradient, bound->spec(), &reason); !s.ok()) return refuse(reason, std::move(s));
  const uint32_t crc = Crc32c({reinterpret_cast<const std::byte*>(gradient->data().data()), gradient->data().size()});
  if (crc != gradient->crc32c()) {
    return refuse("checksum", absl::DataLossError(absl::StrCat(
                                  "chunk ", gradient->chunk(), " of tensor ", gradient->tensor(), " '",
                                  bound->spec().tensors[gradient->tensor()].name, "': crc32c of the data is ", crc,
                                  ", the message says ", gradient->crc32c(), "; nothing of it was used")));
  }
  return message::Gradient{.micro = gradient->micro(),
                           .tensor = gradient->tensor(),
                           .chunk = gradient->chunk(),
                           .crc = crc,
                           .data = std::move(*gradient->mutable_data())};
}

void TrainStream::Consumed() {
  {
    absl::MutexLock lock(&mu_);
    --unconsumed_;
  }
  ReadOn();
}

bool TrainStream::StartWriteUnlessFinished() {
  absl::MutexLock lock(&mu_);
  if (finished_) return false;
  StartWrite(&response_);
  return true;
}

bool TrainStream::WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) {
  FillWeights(chunk, run()->spec(), piece, response_.mutable_weights());
  if (StartWriteUnlessFinished()) return true;
  TakeBack(piece);
  return false;
}

void TrainStream::TakeBack(WeightPiece* piece) { response_.mutable_weights()->mutable_data()->swap(piece->data); }

bool TrainStream::Write(const StreamOutput& output) {
  if (std::holds_alternative<output::Opened>(output)) response_.mutable_opened();
  if (const auto* credit = std::get_if<output::Credit>(&output)) *response_.mutable_credit() = FromCredit(*credit);
  if (const auto* drain = std::get_if<output::Drain>(&output)) response_.mutable_drain()->set_reason(drain->reason);
  if (const auto* closed = std::get_if<ClosedStep>(&output)) *response_.mutable_step_result() = FromClosedStep(*closed);
  return StartWriteUnlessFinished();
}

void TrainStream::Finish(absl::Status status) {
  absl::MutexLock lock(&mu_);
  if (std::exchange(finished_, true)) return;
  code_ = status.code();
  Reactor::Finish(ToGrpc(status));
}

void TrainStream::Cancel() {
  absl::MutexLock lock(&mu_);
  if (context_ != nullptr) context_->TryCancel();
}

void TrainStream::OnWriteDone(bool) {
  if (const auto bound = run(); bound != nullptr) bound->OnWritten(shared_from_this());
}

void TrainStream::OnCancel() {
  Finish(absl::CancelledError("the connection was lost"));
  if (const auto bound = run(); bound != nullptr) bound->OnStreamGone(shared_from_this());
}

void TrainStream::OnDone() {
  const auto self = std::move(self_);
  std::shared_ptr<Run> bound;
  {
    absl::MutexLock lock(&mu_);
    context_ = nullptr;
    bound = run_;
    record_.Done(code_);
  }
  environment_.metrics->OnStreams(-1);
  // Also the one path on which a stream that was cancelled while it was being bound reaches its run.
  if (bound != nullptr) bound->OnStreamGone(self);
}

}  // namespace ballast
