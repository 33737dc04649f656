#include "server/rpc/train_stream.h"

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/batch.h"
#include "proto/nccl/nccl_loss.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/rpc/admission.h"
#include "server/rpc/request_memory.h"
#include "server/rpc/train_messages.h"

namespace ballast {
namespace {

constexpr size_t kMostWhyBytes = 1000;

void AddBatch(Run* run, v1::RequestBatch* batch, std::vector<RankMessage>* messages) {
  int64_t count = 0;  // each tensor of small gradients is one
  for (const v1::TrainRequest& request : batch->requests()) {
    count += request.has_small_gradients() ? request.small_gradients().tensors_size() : 1;
  }
  if (count > kMostBatchMessages) {
    return messages->push_back(message::Bad{absl::InvalidArgumentError(
        absl::StrCat("a batch of ", count, " messages, wanted at most ", kMostBatchMessages))});
  }
  for (v1::TrainRequest& request : *batch->mutable_requests()) AddRankMessages(run, &request, {}, messages);
}

absl::Status CheckIds(const v1::NcclIds& ids) {
  for (const std::string* id : {&ids.gradients(), &ids.weights()}) {
    if (id->size() == Nccl::kIdBytes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("Open.nccl has an id of ", id->size(), " bytes, wanted ", Nccl::kIdBytes, ", of ncclGetUniqueId"));
  }
  return absl::OkStatus();
}

}  // namespace

TrainStream* TrainStream::Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context) {
  std::shared_ptr<TrainStream> stream(new TrainStream(environment, context));
  stream->HoldUntilDone(stream);
  const auto by = std::chrono::system_clock::now() + std::chrono::duration<double>(environment.open_timeout_s);
  stream->open_alarm_.Set(std::chrono::time_point_cast<std::chrono::system_clock::duration>(by),
                          [weak = stream->weak_from_this()](bool due) {
                            if (const auto alive = weak.lock(); alive != nullptr && due) alive->OnOpenOverdue();
                          });
  const absl::Status known = stream->CheckCaller(*context);
  known.ok() ? stream->ReadOn() : stream->Finish(known);
  return stream.get();
}

TrainStream::TrainStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context)
    : StreamCall(environment.metrics, "Train", context->peer(), context),
      environment_(environment),
      peer_(context->peer()) {
  environment_.metrics->OnStreams(1);
}

absl::Status TrainStream::CheckCaller(const grpc::CallbackServerContext& context) {
  ASSIGN_OR_RETURN(caller_, Enter(environment_, context, "Train"));
  return CheckKnown(environment_, caller_);
}

void TrainStream::OnOpenOverdue() {
  if (run() != nullptr) return;
  Finish(NoOpenCame(environment_));
}

std::shared_ptr<Run> TrainStream::run() {
  absl::MutexLock lock(&mu_);
  return run_;
}

void TrainStream::ReadOn() {
  absl::MutexLock lock(&mu_);
  if (unconsumed_ == 0) large_ = false;
  const int most = lane_ == nullptr || large_ ? kMostUnconsumed : kMostByNccl;
  if (ended_ || reading_ || input_closed_ || unconsumed_ >= most) return;
  reading_ = true;
  StartRead(&request_);
}

void TrainStream::OnReadDone(bool ok) {
  const auto self = shared_from_this();
  std::shared_ptr<Run> bound;
  bool ended = false, cancelled = false;
  {
    absl::MutexLock lock(&mu_);
    cancelled = context_->IsCancelled();
    input_closed_ = !ok;
    bound = run_;
    ended = ended_;
  }
  if (ended) return;
  if (bound == nullptr) {
    const absl::Status s = ok ? Bind() : absl::InvalidArgumentError("the stream ended before its first message");
    if (!s.ok()) return Finish(s);
  } else if (ok) {
    Take(bound);
  } else if (!cancelled && (lane_ == nullptr || !lane_->receiver().QueueEnd())) {
    bound->OnInputClosed(self);
  }
  {
    absl::MutexLock lock(&mu_);
    reading_ = false;  // request_ is free: the strand, too, may begin the next read
  }
  ReadOn();
}

void TrainStream::Take(const std::shared_ptr<Run>& bound) {
  const size_t bytes = request_.ByteSizeLong();
  if (lane_ == nullptr) {
    HandOver(bound, &request_, {});
  } else {
    {
      absl::MutexLock lock(&mu_);
      ++unconsumed_;
      large_ = large_ || bytes > kMostBatchedBytes;
    }
    if (!lane_->receiver().Queue(&request_)) OnQueued(&request_, {});
  }
  LetGoOfLarge(bytes, &request_);
}

void TrainStream::HandOver(const std::shared_ptr<Run>& bound, v1::TrainRequest* request, Payload payload) {
  std::vector<RankMessage> messages;
  if (absl::Status s = CheckMessageBytes(request->ByteSizeLong(), environment_); !s.ok()) {
    messages.push_back(message::Bad{std::move(s)});
  } else if (!request->has_batch()) {
    AddRankMessages(bound.get(), request, std::move(payload), &messages);
  } else {
    AddBatch(bound.get(), request->mutable_batch(), &messages);
  }
  {
    absl::MutexLock lock(&mu_);
    unconsumed_ += static_cast<int>(messages.size());
  }
  bound->OnMessages(shared_from_this(), std::move(messages));
}

void TrainStream::OnQueued(v1::TrainRequest* request, Payload payload) {
  const auto bound = run();
  if (request == nullptr) return bound->OnInputClosed(shared_from_this());
  HandOver(bound, request, std::move(payload));
  Consumed();  // as one that was queued
}

absl::Status TrainStream::Bind() {
  const size_t bytes = request_.ByteSizeLong();
  RETURN_IF_ERROR(CheckMessageBytes(bytes, environment_));
  ASSIGN_OR_RETURN(TrainBinding binding, BindTrain(environment_, request_));
  ASSIGN_OR_RETURN(place_, AdmitStream(environment_, caller_, "Train", binding.run->spec().run_id, &record_));
  environment_.connections->Trust(peer_);
  if (request_.open().has_nccl()) {
    RETURN_IF_ERROR(CheckIds(request_.open().nccl()));
    OpenLane(*binding.run, request_.open().nccl());
  }
  {
    absl::MutexLock lock(&mu_);
    run_ = binding.run;
    out_.set_takes_batches(request_.open().takes_batches());
    out_.set_takes_small_weights(request_.open().takes_small_weights());
  }
  LetGoOfLarge(bytes, &request_);
  StartLane();
  binding.run->OpenStream(shared_from_this(), std::move(binding.opened));
  return absl::OkStatus();
}

void TrainStream::OpenLane(const Run& run, const v1::NcclIds& ids) {
  auto lane = environment_.nccl->Open(run, ids);
  if (lane.ok()) {
    lane_ = *std::move(lane);
  } else {
    why_no_nccl_ = ValidUtf8(std::string(lane.status().message()), kMostWhyBytes);
  }
}

void TrainStream::StartLane() {
  if (lane_ == nullptr) return;
  const auto weak = weak_from_this();
  const auto deliver = [weak](v1::TrainRequest* request, Payload payload) {
    if (const auto self = weak.lock()) self->OnQueued(request, std::move(payload));
  };
  const auto on_room = [weak] {
    if (const auto self = weak.lock()) self->run()->OnRoom();
  };
  const auto on_lost = [weak](const absl::Status& why) {
    if (const auto self = weak.lock()) self->OnLaneLost(why);
  };
  const absl::Status started = environment_.nccl->Start(lane_, {deliver, on_room, on_lost});
  if (started.ok()) return;
  why_no_nccl_ = std::string(started.message());
  lane_ = nullptr;
}

// What the rank does wrong is said in its turn, as of other messages.
void TrainStream::OnLaneLost(const absl::Status& why) {
  const std::shared_ptr<Run> bound = run();
  if (absl::IsInvalidArgument(why)) {
    std::vector<RankMessage> bad;
    bad.push_back(message::Bad{why});
    return bound->OnMessages(shared_from_this(), std::move(bad));
  }
  Log(LogLevel::kWarn, "transport", "a rank has lost NCCL; if it is still there, it resumes its stream",
      {{"run_id", bound->spec().run_id}, {"peer", peer_}, {"err", std::string(why.message())}});
  Finish(NcclLostError(why.message()));
}

void TrainStream::Consumed() {
  {
    absl::MutexLock lock(&mu_);
    --unconsumed_;
  }
  ReadOn();
}

Written TrainStream::Send() {
  absl::MutexLock lock(&mu_);
  if (ended_) return Written::kOver;
  const bool taken = out_.Add(&response_);
  if (out_.full()) WriteNext();  // so that it goes while others gather
  return taken ? Written::kNow : Written::kLater;
}

void TrainStream::Flush() {
  absl::MutexLock lock(&mu_);
  WriteNext();
}

void TrainStream::WriteNext() {
  if (const v1::TrainResponse* next = out_.Next(); next != nullptr) StartWrite(next);
}

Written TrainStream::WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) {
  v1::Weights* const weights = response_.mutable_weights();
  FillWeights(chunk, run()->spec(), piece, weights);
  const bool by_nccl = piece->place != nullptr && piece->placed_bytes > 0;
  weights->clear_nccl();
  if (by_nccl) weights->mutable_nccl()->set_bytes(static_cast<uint32_t>(piece->placed_bytes));
  const Written written = Send();
  if (by_nccl && written != Written::kOver) lane_->sender().Give(piece->slot, piece->placed_bytes);
  if (piece->place == nullptr && written == Written::kOver) TakeBack(piece);
  return written;
}

void TrainStream::TakeBack(WeightPiece* piece) {
  if (piece->place == nullptr) return response_.mutable_weights()->mutable_data()->swap(piece->data);
  if (piece->placed_bytes == 0) return Unlend(piece);  // nothing is to be sent
  piece->place = nullptr;
  piece->on_device = false;
}

bool TrainStream::Lend(WeightPiece* piece, bool small) {
  if (small || lane_ == nullptr || !lane_->connected()) return true;
  const auto slot = lane_->sender().Take();
  if (!slot) return false;
  piece->slot = *slot;
  piece->place = lane_->sender().slots().at(*slot);
  piece->on_device = true;
  piece->crc32c = 0;
  return true;
}

void TrainStream::Unlend(WeightPiece* piece) {
  if (piece->place == nullptr) return;
  lane_->sender().PutBack(piece->slot);
  piece->place = nullptr;
  piece->on_device = false;
}

Written TrainStream::Write(const StreamOutput& output) {
  response_ = FromOutput(output, run()->spec());
  if (response_.has_opened()) {
    response_.mutable_opened()->set_takes_batches(true);
    if (lane_ != nullptr) *response_.mutable_opened()->mutable_nccl() = lane_->slots();
    if (!why_no_nccl_.empty()) response_.mutable_opened()->mutable_nccl()->set_why_none(why_no_nccl_);
  }
  if (response_.has_credit() && lane_ != nullptr) {
    const std::vector<uint32_t> returned = lane_->receiver().TakeReturned();
    response_.mutable_credit()->mutable_nccl_slots()->Add(returned.begin(), returned.end());
  }
  return Send();
}

void TrainStream::TellGrpc(const absl::Status& status) {
  if (out_.empty()) return Reactor::Finish(ToGrpc(status));
  end_ = ToGrpc(status);
  WriteNext();
}

void TrainStream::OnWriteDone(bool ok) {
  const auto self = shared_from_this();
  std::shared_ptr<Run> answered;
  {
    absl::MutexLock lock(&mu_);
    if (out_.Written(ok)) answered = run_;
    WriteNext();
    if (end_ && out_.empty()) Reactor::Finish(*std::exchange(end_, std::nullopt));
  }
  if (answered != nullptr) answered->OnWritten(self);
}

void TrainStream::OnCancel() {
  StreamCall::OnCancel();
  if (const auto bound = run(); bound != nullptr) bound->OnStreamGone(shared_from_this());
}

// The run tells more in the log.
void TrainStream::Record(const absl::Status& status) { run_ == nullptr ? record_.Done(status) : record_.Count(status); }

void TrainStream::OnGone() {
  environment_.metrics->OnStreams(-1);
  if (lane_ != nullptr) lane_->Stop();
  // A stream that was cancelled while it was being bound reaches its run only on this path.
  if (const auto bound = run(); bound != nullptr) bound->OnStreamGone(shared_from_this());
}

}  // namespace ballast
