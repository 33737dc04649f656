#include "server/run/rank_outbox.h"

#include <algorithm>
#include <utility>

namespace ballast {

RankOutbox::RankOutbox(Environment environment, const Plan& plan) : environment_(std::move(environment)) {
  for (Buffer& buffer : buffers_) {
    buffer.piece.Reserve(plan.send_buffer_bytes, plan.send_buffer_scales);
    buffer_bytes_ += buffer.piece.reserved_bytes();
  }
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
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::kReady) Discard(&buffer);
    buffer.stale = buffer.state != BufferState::kFree;
  }
}

void RankOutbox::Pump() {
  if (stream_ == nullptr) return;
  Encode();
  if (!writing_) WriteNext();
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
  for (Buffer& buffer : buffers_) {
    if (tensors_.empty() || held_) return;
    if (buffer.state != BufferState::kFree) continue;
    if (!stream_->Lend(&buffer.piece)) return;
    buffer.stream = stream_;
    EncodeNextChunk(&buffer);
  }
}

void RankOutbox::Discard(Buffer* buffer) {
  buffer->stream->Unlend(&buffer->piece);
  buffer->stream.reset();
  buffer->state = BufferState::kFree;
}

void RankOutbox::EncodeNextChunk(Buffer* buffer) {
  const RunSpec& spec = *environment_.spec;
  const auto [step, tensor] = tensors_.front();
  const TensorSpec& t = spec.tensors[tensor];
  const uint64_t chunk = *NextReceived(tensor, next_chunk_);
  const uint64_t first = ChunkBegin(spec, chunk);
  const ChunkPart part = PartIn(receives_, tensor, chunk, ChunkEnd(spec, t, chunk) - first);
  const TensorRange range{tensor, first + part.begin, first + part.end};
  const bool last = !NextReceived(tensor, chunk + 1);
  buffer->chunk = {.step = step, .tensor = tensor, .chunk = chunk, .last = last};
  buffer->state = BufferState::kEncoding;
  buffer->stale = false;
  buffer->order = encoded_++;
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
  }
  Pump();
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

RankOutbox::Buffer* RankOutbox::NextReady() {
  Buffer* next = nullptr;
  for (Buffer& buffer : buffers_) {
    const bool mine = buffer.state == BufferState::kReady || (buffer.state == BufferState::kEncoding && !buffer.stale);
    if (mine && (next == nullptr || buffer.order < next->order)) next = &buffer;
  }
  return next != nullptr && next->state == BufferState::kReady ? next : nullptr;
}

void RankOutbox::WriteNext() {
  if (auto control = NextControl()) {
    writing_ = stream_->Write(*control);
    return;
  }
  if (Buffer* buffer = NextReady(); buffer != nullptr) {
    const uint64_t bytes = buffer->piece.bytes();
    writing_ = stream_->WriteWeights(buffer->chunk, &buffer->piece);
    if (!writing_) return Discard(buffer);
    buffer->state = BufferState::kWriting;
    environment_.on_sent(bytes);
    return;
  }
  if (!results_.empty() && tensors_.empty() && !held_ && !AnyBufferBusy()) {
    writing_ = stream_->Write(results_.front());
    results_.pop_front();
  }
}

bool RankOutbox::AnyBufferBusy() const {
  return std::any_of(buffers_.begin(), buffers_.end(),
                     [](const Buffer& buffer) { return buffer.state != BufferState::kFree && !buffer.stale; });
}

void RankOutbox::OnWritten(const RankStream* stream) {
  for (Buffer& buffer : buffers_) {
    if (buffer.state != BufferState::kWriting || buffer.stream.get() != stream) continue;
    buffer.stream->TakeBack(&buffer.piece);
    buffer.stream.reset();
    buffer.state = BufferState::kFree;
  }
  if (stream == stream_.get()) writing_ = false;
  Pump();
}

bool RankOutbox::idle() const {
  return !writing_ && !opened_ && credit_bytes_ == 0 && !wanted_ && !measured_ && !drain_ && results_.empty() &&
         tensors_.empty() && !AnyBufferBusy();
}

}  // namespace ballast
