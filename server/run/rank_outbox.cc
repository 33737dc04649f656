#include "server/run/rank_outbox.h"

#include <algorithm>
#include <utility>

namespace ballast {

RankOutbox::RankOutbox(Environment environment, const Plan& plan) : environment_(std::move(environment)) {
  for (Slot& slot : slots_) {
    slot.piece.Reserve(plan.send_slot_bytes, plan.send_slot_scales);
    slot_bytes_ += slot.piece.reserved_bytes();
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
  acknowledged_ = acknowledgement_sent_ = 0;
  drain_.reset();
}

void RankOutbox::DropPublished() {
  tensors_.clear();
  next_chunk_ = 0;
  results_.clear();
  for (Slot& slot : slots_) {
    if (slot.state == SlotState::kReady) Discard(&slot);
    slot.stale = slot.state != SlotState::kFree;
  }
}

void RankOutbox::Pump() {
  if (stream_ == nullptr) return;
  Encode();
  if (!writing_) WriteNext();
}

void RankOutbox::Publish(uint64_t step, uint32_t tensor) {
  if (NextReceived(tensor, 0)) tensors_.push_back({step, tensor});
}

std::optional<uint64_t> RankOutbox::NextReceived(uint32_t tensor, uint64_t from) const {
  const uint64_t chunks = ChunkCount(*environment_.spec, environment_.spec->tensors[tensor]);
  while (from < chunks && !Contains(receives_, tensor, from)) ++from;
  return from < chunks ? std::optional<uint64_t>(from) : std::nullopt;
}

void RankOutbox::Encode() {
  for (Slot& slot : slots_) {
    if (tensors_.empty()) return;
    if (slot.state != SlotState::kFree) continue;
    if (!stream_->Lend(&slot.piece)) return;
    slot.stream = stream_;
    EncodeNextChunk(&slot);
  }
}

void RankOutbox::Discard(Slot* slot) {
  slot->stream->Unlend(&slot->piece);
  slot->stream.reset();
  slot->state = SlotState::kFree;
}

void RankOutbox::EncodeNextChunk(Slot* slot) {
  const RunSpec& spec = *environment_.spec;
  const auto [step, tensor] = tensors_.front();
  const TensorSpec& t = spec.tensors[tensor];
  const uint64_t chunk = *NextReceived(tensor, next_chunk_);
  const TensorRange range{tensor, ChunkBegin(spec, chunk), ChunkEnd(spec, t, chunk)};
  const bool last = !NextReceived(tensor, chunk + 1);
  slot->chunk = {.step = step, .tensor = tensor, .chunk = chunk, .last = last};
  slot->state = SlotState::kEncoding;
  slot->stale = false;
  slot->order = encoded_++;
  next_chunk_ = chunk + 1;
  if (last) {
    tensors_.pop_front();
    next_chunk_ = 0;
  }
  environment_.store->EncodeWeights(range, &slot->piece, [this, slot](const TaskResult&) { Encoded(slot); });
}

void RankOutbox::Encoded(Slot* slot) {
  if (slot->stale) {
    Discard(slot);
  } else {
    slot->state = SlotState::kReady;
  }
  Pump();
}

std::optional<StreamOutput> RankOutbox::NextControl() {
  if (std::exchange(opened_, false)) return output::Opened{};
  if (credit_bytes_ > 0 || wanted_ || acknowledgement_sent_ != acknowledged_) {
    acknowledgement_sent_ = acknowledged_;
    return output::Credit{std::exchange(credit_bytes_, 0), std::exchange(wanted_, std::nullopt), acknowledged_};
  }
  if (drain_) return output::Drain{*std::exchange(drain_, std::nullopt)};
  return std::nullopt;
}

RankOutbox::Slot* RankOutbox::NextReady() {
  Slot* next = nullptr;
  for (Slot& slot : slots_) {
    const bool mine = slot.state == SlotState::kReady || (slot.state == SlotState::kEncoding && !slot.stale);
    if (mine && (next == nullptr || slot.order < next->order)) next = &slot;
  }
  return next != nullptr && next->state == SlotState::kReady ? next : nullptr;
}

void RankOutbox::WriteNext() {
  if (auto control = NextControl()) {
    writing_ = stream_->Write(*control);
    return;
  }
  if (Slot* slot = NextReady(); slot != nullptr) {
    const uint64_t bytes = slot->piece.bytes();
    writing_ = stream_->WriteWeights(slot->chunk, &slot->piece);
    if (!writing_) return Discard(slot);
    slot->state = SlotState::kWriting;
    environment_.on_sent(bytes);
    return;
  }
  if (!results_.empty() && tensors_.empty() && !AnySlotBusy()) {
    writing_ = stream_->Write(results_.front());
    results_.pop_front();
  }
}

bool RankOutbox::AnySlotBusy() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.state != SlotState::kFree && !slot.stale; });
}

void RankOutbox::OnWritten(const RankStream* stream) {
  for (Slot& slot : slots_) {
    if (slot.state != SlotState::kWriting || slot.stream.get() != stream) continue;
    slot.stream->TakeBack(&slot.piece);
    slot.stream.reset();
    slot.state = SlotState::kFree;
  }
  if (stream == stream_.get()) writing_ = false;
  Pump();
}

bool RankOutbox::idle() const {
  return !writing_ && !opened_ && credit_bytes_ == 0 && !wanted_ && !drain_ && results_.empty() && tensors_.empty() &&
         !AnySlotBusy();
}

}  // namespace ballast
