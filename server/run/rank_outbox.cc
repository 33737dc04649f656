#include "server/run/rank_outbox.h"

#include <utility>

namespace ballast {

RankOutbox::RankOutbox(Environment environment, const Plan& plan) : environment_(std::move(environment)) {
  const uint64_t large = SendBuffersOfARank(*environment_.spec);
  buffers_ = std::vector<Buffer>(large + (plan.small_buffer_bytes > 0 ? kSmallSendBuffers : 0));
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& buffer = buffers_[i];
    buffer.small = i >= large;
    buffer.piece.Reserve(buffer.small ? plan.small_buffer_bytes : plan.send_buffer_bytes,
                         buffer.small ? plan.small_buffer_scales : plan.send_buffer_scales);
    buffer_bytes_ += buffer.piece.reserved_bytes();
    Free(&buffer);
  }
}

void RankOutbox::Free(Buffer* buffer) {
  buffer->stream.reset();
  buffer->state = BufferState::kFree;
  (buffer->small ? free_small_ : free_large_).push_back(buffer);
}

void RankOutbox::Bind(std::shared_ptr<RankStream> stream) {
  Unbind();
  stream_ = std::move(stream);
}

void RankOutbox::Unbind() {
  DropPublished();
  stream_.reset();
  writing_ = false;
  opened_ = false;
  credit_bytes_ = 0;
  wanted_.reset();
  measured_.reset();
  acknowledged_ = acknowledgement_sent_ = 0;
  drain_.reset();
}

void RankOutbox::DropPublished() {
  tensors_.clear();
  waiting_.clear();
  next_chunk_ = 0;
  results_.clear();
  begun_.clear();
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::kReady) Discard(&buffer);
    buffer.stale = buffer.state != BufferState::kFree;
  }
}

void RankOutbox::Pump() {
  if (stream_ == nullptr) return;
  do {
    Encode();
  } while (!writing_ && WriteNext());
  if (std::exchange(unflushed_, false)) stream_->Flush();
}

void RankOutbox::Publish(uint64_t step, uint32_t tensor, bool waits) {
  if (NextReceived(tensor, 0)) (waits ? waiting_ : tensors_).push_back({step, tensor});
}

void RankOutbox::Release() {
  tensors_.insert(tensors_.end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
}

std::optional<uint64_t> RankOutbox::NextReceived(uint32_t tensor, uint64_t from) const {
  return NextIn(receives_, tensor, from, ChunkCount(*environment_.spec, environment_.spec->tensors[tensor]));
}

void RankOutbox::Encode() {
  while (!tensors_.empty() && !held_) {
    const bool small = IsSentSmall(environment_.spec->tensors[tensors_.front().tensor]);
    std::vector<Buffer*>& free = small ? free_small_ : free_large_;
    if (free.empty()) return;
    const bool in_message = stream_->on_device() && NextIsCut();  // the host cuts it
    if (!in_message && !stream_->Lend(&free.back()->piece, small)) return;
    Buffer* const buffer = free.back();
    free.pop_back();
    buffer->stream = stream_;
    begun_.push_back(buffer);
    EncodeNextChunk(buffer);
  }
}

ChunkPart RankOutbox::PartOfNext(uint64_t* chunk) const {
  const RunSpec& spec = *environment_.spec;
  const uint32_t tensor = tensors_.front().tensor;
  *chunk = *NextReceived(tensor, next_chunk_);
  return PartIn(receives_, tensor, *chunk, ChunkEnd(spec, spec.tensors[tensor], *chunk) - ChunkBegin(spec, *chunk));
}

bool RankOutbox::NextIsCut() const {
  uint64_t chunk = 0;
  const ChunkPart part = PartOfNext(&chunk);
  return part.begin > 0 || part.end < part.of;
}

void RankOutbox::Discard(Buffer* buffer) {
  buffer->stream->Unlend(&buffer->piece);
  Free(buffer);
}

void RankOutbox::TakeBack(Buffer* buffer) {
  buffer->stream->TakeBack(&buffer->piece);
  Free(buffer);
}

void RankOutbox::EncodeNextChunk(Buffer* buffer) {
  const RunSpec& spec = *environment_.spec;
  const auto [step, tensor] = tensors_.front();
  uint64_t chunk = 0;
  const ChunkPart part = PartOfNext(&chunk);
  const uint64_t first = ChunkBegin(spec, chunk);
  const TensorRange range{tensor, first + part.begin, first + part.end};
  const bool last = !NextReceived(tensor, chunk + 1);
  buffer->chunk = {.step = step, .tensor = tensor, .chunk = chunk, .last = last};
  buffer->state = BufferState::kEncoding;
  buffer->stale = false;
  next_chunk_ = chunk + 1;
  if (last) {
    tensors_.pop_front();
    next_chunk_ = 0;
  }
  environment_.store->EncodeWeights(range, &buffer->piece, [this, buffer](const TaskResult&) { Encoded(buffer); });
}

void RankOutbox::Encoded(Buffer* buffer) {
  if (buffer->stale) {
    Discard(buffer);
  } else {
    buffer->state = BufferState::kReady;
    if (!buffer->small) Pump();
  }
  environment_.settle();
}

std::optional<StreamOutput> RankOutbox::NextControl() {
  if (std::exchange(opened_, false)) return output::Opened{};
  if (credit_bytes_ > 0 || wanted_ || acknowledgement_sent_ != acknowledged_) {
    acknowledgement_sent_ = acknowledged_;
    return output::Credit{std::exchange(credit_bytes_, 0), std::exchange(wanted_, std::nullopt), acknowledged_};
  }
  if (measured_) return *std::exchange(measured_, std::nullopt);
  if (drain_) return output::Drain{*std::exchange(drain_, std::nullopt)};
  return std::nullopt;
}

bool RankOutbox::WriteNext() {
  if (auto control = NextControl()) return Went(stream_->Write(*control));
  if (!begun_.empty()) return begun_.front()->state == BufferState::kReady && WriteChunk();
  if (results_.empty() || !tensors_.empty() || held_) return false;
  const StepRecord result = std::move(results_.front());
  results_.pop_front();
  return Went(stream_->Write(result));
}

bool RankOutbox::WriteChunk() {
  Buffer* const buffer = begun_.front();
  begun_.pop_front();
  const uint64_t bytes = buffer->piece.bytes();
  const Written written = stream_->WriteWeights(buffer->chunk, &buffer->piece);
  if (written == Written::kOver) {
    Discard(buffer);
    return false;
  }
  environment_.on_sent(bytes);
  buffer->state = BufferState::kWriting;
  if (written == Written::kNow) TakeBack(buffer);
  return Went(written);
}

bool RankOutbox::Went(Written written) {
  writing_ = written == Written::kLater;
  unflushed_ = true;
  return written == Written::kNow;
}

void RankOutbox::OnWritten(const RankStream* stream) {
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::kWriting && buffer.stream.get() == stream) TakeBack(&buffer);
  }
  if (stream == stream_.get()) writing_ = false;
}

bool RankOutbox::idle() const {
  return !writing_ && !opened_ && credit_bytes_ == 0 && !wanted_ && !measured_ && !drain_ && results_.empty() &&
         tensors_.empty() && begun_.empty();
}

}  // namespace ballast
