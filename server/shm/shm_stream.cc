#include "server/shm/shm_stream.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/batch.h"

#include "server/base/clock.h"
#include "server/base/start_thread.h"
#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/rpc/request_memory.h"
#include "server/rpc/train_messages.h"

namespace ballast {
namespace {

constexpr size_t kHandedOverTogether = 32;       // messages
constexpr uint64_t kWrittenTogether = 16 << 10;  // bytes of records

// The longest sleep: a trainer that tampers with the bell delays its own stream by no more than this.
constexpr std::chrono::milliseconds kGlance = std::chrono::seconds(1);

std::string FinishBody(const absl::Status& status) {
  const grpc::Status plain = ToGrpc(status);
  const auto code = static_cast<uint32_t>(plain.error_code());
  std::string body(sizeof code, '\0');
  std::memcpy(body.data(), &code, sizeof code);
  return body + plain.error_message();
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShmStream>> ShmStream::Start(const RpcEnvironment& environment, Connection* connection) {
  std::shared_ptr<ShmStream> stream(new ShmStream(environment, std::move(*connection)));
  try {
    stream->thread_ = StartThread([self = stream.get()] { self->Loop(); });  // joined before the stream is let go
    return stream;
  } catch (const NoThread& none) {
    const absl::Status why = absl::ResourceExhaustedError(none.what());
    connection->socket = std::move(stream->connection_.socket);
    stream->record_.Done(why);
    environment.metrics->OnStreams(-1);
    return why;
  }
}

absl::Status ShmStream::Grant() const {
  ShmSegment& segment = *connection_.segment;
  ShmGrant grant{.shape = segment.shape()};
  connection_.why_no_gpu.copy(grant.message.data(), grant.message.size() - 1);
  std::vector<int> descriptors = {segment.fd()};
  if (connection_.gpu != nullptr) descriptors.push_back(connection_.gpu->fd());
  RETURN_IF_ERROR(connection_.socket.Answer(grant, descriptors));
  segment.CloseFd();
  return absl::OkStatus();
}

ShmStream::ShmStream(const RpcEnvironment& environment, Connection connection)
    : environment_(environment),
      connection_(std::move(connection)),
      control_(connection_.segment->control()),
      record_(environment.metrics, "Train", connection_.peer),
      reader_(UpPipe(*connection_.segment), environment.message_bytes),
      pulse_(&control_.daemon_beats, &control_.trainer_beats),
      open_by_s_(MonotonicSeconds() + environment.open_timeout_s),
      borrower_(GradientSlots(*connection_.segment, GpuMemory())),
      lender_(WeightSlots(*connection_.segment, GpuMemory())),
      writer_(DownPipe(*connection_.segment)) {
  environment_.metrics->OnStreams(1);
}

std::byte* ShmStream::GpuMemory() const { return connection_.gpu == nullptr ? nullptr : connection_.gpu->data(); }

void ShmStream::Read(absl::Span<const std::byte> borrowed, char* to) const {
  if (connection_.gpu == nullptr) return Lender::Read(borrowed, to);
  connection_.gpu->Read(borrowed.data(), borrowed.size(), to);
}

void ShmStream::HangUpAndJoin() {
  gone_ = true;
  Nudge();
  thread_.join();
}

void ShmStream::Nudge() {
  nudged_ = true;
  Ring(&control_.daemon_bell);
}

// --- the thread -----------------------------------------------------------------------------------------------------

void ShmStream::Loop() {
  ShmWaiter waiter(&control_.daemon_bell);
  while (!Over() && !pulse_.Lost()) {
    pulse_.Beat();
    ReadRecords();
    EndUnopened();
    WriteOn();
    TellRoom();
    if (Over()) break;
    waiter.Await(Patience(), [this] { return HasWork(); });
    nudged_ = false;
  }
  if (!cancelled_) ReadRecords();  // what was said before the end counts
  End();
}

// How long to sleep until it is time to look whether Open has come.
std::chrono::milliseconds ShmStream::Patience() const {
  if (run_ != nullptr || input_over_) return kGlance;
  const double left_s = open_by_s_ - MonotonicSeconds();
  return std::clamp(std::chrono::milliseconds(static_cast<int64_t>(std::ceil(left_s * 1000))),
                    std::chrono::milliseconds(1), kGlance);
}

void ShmStream::EndUnopened() {
  if (run_ == nullptr && !input_over_ && MonotonicSeconds() >= open_by_s_) Refuse(NoOpenCame(environment_));
}

bool ShmStream::HasWork() {
  if (nudged_ || (MayRead() && reader_.HasMore())) return true;
  if (starved_ && lender_.returned() != returned_then_) return true;
  if (!writing_on_) return false;
  absl::MutexLock lock(&mu_);
  return writer_.HasRoom();
}

// Whether the peer is gone, or has got all it will ever get.
bool ShmStream::Over() {
  if (gone_) return true;
  absl::MutexLock lock(&mu_);
  return finished_ && writer_.empty();
}

void ShmStream::ReadRecords() {
  while (MayRead()) {
    ShmRecord record;
    pulse_.Beat();  // a trainer may write without a pause
    const absl::StatusOr<bool> next = reader_.Next(&record);
    if (control_.up_full.TakeDown()) Ring(&control_.trainer_bell);
    if (next.ok() && !*next) break;
    if (absl::Status s = next.ok() ? Take(record) : next.status(); !s.ok()) Refuse(std::move(s));
    const bool small = record.payload_bytes <= kMostBatchedBytes && arrived_.size() < kHandedOverTogether;
    if (!small) HandOver();
  }
  HandOver();
}

void ShmStream::HandOver() {
  if (!arrived_.empty()) run_->OnMessages(shared_from_this(), std::exchange(arrived_, {}));
}

// Ends the stream after the messages that came before.
void ShmStream::Refuse(absl::Status status) {
  input_over_ = true;
  if (run_ == nullptr) return Finish(std::move(status));
  ++unconsumed_;
  arrived_.push_back(message::Bad{std::move(status)});
}

absl::Status ShmStream::Take(const ShmRecord& record) {
  if (record.type == ShmRecord::kMessage) return TakeMessage(record);
  if (record.type != ShmRecord::kHalfClose) {
    return absl::InvalidArgumentError("a trainer does not finish a stream, it closes its half");
  }
  if (run_ == nullptr) return absl::InvalidArgumentError("the stream ended before its first message");
  input_over_ = true;
  HandOver();
  run_->OnInputClosed(shared_from_this());
  return absl::OkStatus();
}

absl::Status ShmStream::TakeMessage(const ShmRecord& record) {
  Payload payload;
  if (record.slot != ShmRecord::kNoSlot) {
    const auto bytes = borrower_.Borrow(record.slot, record.payload_bytes);
    if (!bytes.ok()) return bytes.status();
    payload = Payload(shared_from_this(), record.slot, *bytes);
  }
  if (!request_.ParseFromString(reader_.body())) {
    return absl::InvalidArgumentError("a message of the shared-memory transport is no TrainRequest");
  }
  if (payload.size() > 0 && (!request_.has_gradient() || !request_.gradient().data().empty())) {
    return absl::InvalidArgumentError(
        "a slot of the shared-memory transport goes with a Gradient that has no data itself");
  }
  if (run_ == nullptr) return Bind();
  most_unconsumed_ = reader_.body().size() > kMostBatchedBytes ? 1 : kMostUnconsumed;
  const size_t before = arrived_.size();
  AddRankMessages(run_.get(), &request_, std::move(payload), &arrived_);
  unconsumed_ += static_cast<int>(arrived_.size() - before);
  LetGoOfLarge(reader_.body().size(), &request_);
  return absl::OkStatus();
}

absl::Status ShmStream::Bind() {
  auto binding = BindTrain(environment_, request_);
  if (!binding.ok()) return binding.status();
  if (request_.open().session_token() != connection_.token) {
    return absl::InvalidArgumentError(
        "Open shows another token than the one that the shared memory was asked for with");
  }
  takes_data_in_records_ = request_.open().takes_data_in_records();
  takes_small_weights_ = takes_data_in_records_ && request_.open().takes_small_weights();
  run_ = binding->run;
  LetGoOfLarge(reader_.body().size(), &request_);
  run_->OpenStream(shared_from_this(), std::move(binding->opened));
  return absl::OkStatus();
}

void ShmStream::WriteOn() {
  if (!writing_on_) return;
  bool answered = false;
  {
    absl::MutexLock lock(&mu_);
    answered = FlushLocked();
  }
  Ring(&control_.trainer_bell);
  if (answered) run_->OnWritten(shared_from_this());
}

void ShmStream::TellRoom() {
  if (!starved_ || lender_.returned() == returned_then_) return;
  starved_ = false;
  run_->OnRoom();
}

void ShmStream::End() {
  gone_ = true;
  bool owed = false;
  {
    absl::MutexLock lock(&mu_);
    finished_ = true;
    owed = std::exchange(owed_, false);
    run_ == nullptr ? record_.Done(ended_with_) : record_.Count(ended_with_);
  }
  connection_.socket.Shutdown();
  control_.let_go.Raise();
  Ring(&control_.trainer_bell);
  environment_.metrics->OnStreams(-1);
  if (run_ == nullptr) return;
  if (owed) run_->OnWritten(shared_from_this());
  run_->OnStreamGone(shared_from_this());
}

// --- the strand -----------------------------------------------------------------------------------------------------

bool ShmStream::FlushLocked() {
  auto done = writer_.Flush();
  if (done.ok() && !*done) {
    control_.down_full.Raise();
    done = writer_.Flush();  // the trainer may have made room before it could see the flag
  }
  if (!done.ok()) {
    gone_ = true;
    Nudge();
  }
  writing_on_ = !writer_.empty();
  return !writing_on_ && std::exchange(owed_, false);
}

// Of the small weights that were gathered.
void ShmStream::AddGathered() {
  v1::SmallWeights* const small = gathered_.mutable_small_weights();
  if (small->tensors_size() == 0) return;
  writer_.Add({.type = ShmRecord::kMessage}, gathered_.SerializeAsString());
  small->Clear();
}

bool ShmStream::Gather(const v1::Weights& weights) {
  if (!takes_small_weights_ || gone_ || writing_on_ || !AreSmall(weights)) return false;
  v1::SmallWeights* const small = gathered_.mutable_small_weights();
  if (AddSmallWeights(weights, small)) return true;
  absl::MutexLock lock(&mu_);
  AddGathered();
  return AddSmallWeights(weights, small);
}

Written ShmStream::Send(const ShmRecord& record, absl::string_view body) {
  bool answered = false, later = false;
  {
    absl::MutexLock lock(&mu_);
    if (finished_ || gone_) return Written::kOver;
    if (record.slot != ShmRecord::kNoSlot) lender_.Lend(record.slot);
    AddGathered();
    writer_.Add(record, body);
    if (!writing_on_ && writer_.waiting_bytes() < kWrittenTogether) return Written::kNow;
    owed_ = true;
    answered = FlushLocked();
    later = writing_on_;
  }
  if (later) Nudge();
  return answered ? Written::kNow : Written::kLater;
}

void ShmStream::Flush() {
  bool later = false;
  {
    absl::MutexLock lock(&mu_);
    AddGathered();
    if (!writer_.empty() && !writing_on_ && !gone_) FlushLocked();  // nobody is owed an answer
    later = writing_on_;
  }
  if (later) Nudge();
  Ring(&control_.trainer_bell);
}

Written ShmStream::Write(const StreamOutput& output) {
  return Send({.type = ShmRecord::kMessage}, FromOutput(output, run_->spec()).SerializeAsString());
}

// What is in no slot, since it is small, goes through the pipe.
Written ShmStream::WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) {
  v1::Weights* const weights = response_.mutable_weights();
  FillWeights(chunk, run_->spec(), piece, weights);
  ShmRecord record{.type = ShmRecord::kMessage};
  const bool gathered = piece->place == nullptr && Gather(*weights);
  if (!gathered) response_.SerializeToString(&body_);
  if (piece->place == nullptr) {
    weights->mutable_data()->swap(piece->data);
    if (gathered) return Written::kNow;
  } else if (const size_t bytes = piece->encoded().size(); bytes > 0) {
    record.slot = piece->slot;
    record.payload_bytes = static_cast<uint32_t>(bytes);
  } else {
    Unlend(piece);
  }
  return Send(record, body_);
}

bool ShmStream::Lend(WeightPiece* piece, bool small) {
  if (small && takes_data_in_records_) return true;
  returned_then_ = lender_.returned();
  auto slot = lender_.Take();
  if (!slot) {
    starved_ = true;
    control_.weights_out.Raise();
    slot = lender_.Take();  // one may have come back before the trainer could see the flag
    if (!slot) return false;
    starved_ = false;
  }
  piece->slot = *slot;
  piece->place = lender_.at(*slot).data();
  piece->on_device = on_device();
  if (piece->on_device) piece->crc32c = 0;
  return true;
}

void ShmStream::TakeBack(WeightPiece* piece) {
  piece->place = nullptr;
  piece->on_device = false;
}

void ShmStream::Unlend(WeightPiece* piece) {
  if (piece->place != nullptr) lender_.PutBack(piece->slot);
  TakeBack(piece);
}

void ShmStream::Finish(absl::Status status) {
  {
    absl::MutexLock lock(&mu_);
    if (std::exchange(finished_, true)) return;
    ended_with_ = status;
    writer_.Add({.type = ShmRecord::kFinish}, FinishBody(status));
    if (FlushLocked()) owed_ = true;  // the write under way is answered by the thread, like one that found no room
  }
  Ring(&control_.trainer_bell);
  Nudge();
}

void ShmStream::Cancel() {
  cancelled_ = true;
  gone_ = true;
  Nudge();
}

void ShmStream::Consumed() {
  // Not at once where there were many, so that the thread wakes to more than one.
  if (unconsumed_.fetch_sub(1) == (most_unconsumed_ + 1) / 2) Nudge();
}

}  // namespace ballast
