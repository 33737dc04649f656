#include "server/train_stream.h"

#include <utility>

#include "server/convert.h"
#include "server/status_macros.h"
#include "server/train_messages.h"

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
    Payload payload;
    if (request_.has_gradient()) payload = Payload(std::move(*request_.mutable_gradient()->mutable_data()));
    bound->OnMessage(self, ToRankMessage(bound.get(), &request_, std::move(payload)));
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
  ASSIGN_OR_RETURN(TrainBinding binding, BindTrain(environment_, request));
  {
    absl::MutexLock lock(&mu_);
    run_ = binding.run;
  }
  binding.run->OpenStream(shared_from_this(), std::move(binding.opened));
  return absl::OkStatus();
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
  response_ = FromOutput(output, run()->spec());
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
