#include "client/cpp/stream/retransmit_buffer.h"

#include <algorithm>
#include <utility>

namespace ballast {

absl::Span<const std::byte> CutChunk(const TensorTable& tensors, uint32_t tensor, uint64_t chunk,
                                     absl::Span<const std::byte> gradient) {
  const WireTensor& wire = tensors[tensor];
  const ShardPiece of = tensors.PieceOf(tensor, chunk);
  return gradient.subspan((of.first - wire.shard.begin) * wire.gradient_element_bytes,
                          of.size() * wire.gradient_element_bytes);
}

std::vector<std::string> CutIntoChunks(const TensorTable& tensors, uint32_t tensor, uint64_t first, uint64_t last,
                                       absl::Span<const std::byte> gradient, ChunkMemory* memory) {
  std::vector<std::string> chunks;
  chunks.reserve(last - first);
  for (uint64_t k = first; k < last; ++k) chunks.push_back(memory->Copy(CutChunk(tensors, tensor, k, gradient)));
  return chunks;
}

bool RetransmitBuffer::pushed(uint32_t tensor) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& micro) { return micro[tensor].pushed; });
}

RetransmitBuffer::Entry& RetransmitBuffer::Begin(uint32_t tensor, uint64_t first) {
  Entry& entry = entries_.back()[tensor];
  if (!std::exchange(entry.pushed, true)) {
    entry.first = first;
    order_.push_back({micro(), tensor});
  }
  return entry;
}

ChunkRef RetransmitBuffer::AddSent(uint32_t tensor, uint64_t first, uint64_t bytes, const GradientRoom& room) {
  Entry& entry = Begin(tensor, first);
  entry.chunks.push_back({.size = bytes, .room = room});
  return {.micro = micro(), .tensor = tensor, .chunk = entry.first + entry.chunks.size() - 1};
}

void RetransmitBuffer::Add(uint32_t tensor, uint64_t first, std::vector<std::string> chunks) {
  Entry& entry = Begin(tensor, first);
  for (std::string& bytes : chunks) {
    queue_.push_back({.micro = micro(), .tensor = tensor, .chunk = entry.first + entry.chunks.size()});
    const uint64_t size = bytes.size();
    bytes_ += size;
    queued_bytes_ += size;
    entry.chunks.push_back({.bytes = std::move(bytes), .size = size});
  }
  most_bytes_ = std::max(most_bytes_, bytes_);
}

bool RetransmitBuffer::queued(const ChunkRef& id) const {
  return std::find(queue_.begin(), queue_.end(), id) != queue_.end();
}

bool RetransmitBuffer::has(const ChunkRef& id) const {
  if (id.micro > micro() || id.tensor >= tensors_) return false;
  const Entry& entry = entries_[id.micro][id.tensor];
  return entry.pushed && id.chunk < entry.first + entry.chunks.size();
}

std::string RetransmitBuffer::Lend(const ChunkRef& id) {
  queue_.erase(std::find(queue_.begin(), queue_.end(), id));
  queued_bytes_ -= Bytes(id);
  return std::move(At(id).bytes);
}

void RetransmitBuffer::BringBack(const ChunkRef& id, std::string* bytes) {
  if (Chunk& chunk = At(id); !chunk.freed) chunk.bytes = std::move(*bytes);
}

void RetransmitBuffer::Free(const ChunkRef& id, Freed* freed) {
  Chunk& chunk = At(id);
  if (std::exchange(chunk.freed, true)) return;
  if (chunk.room) {
    freed->slots.push_back(chunk.room->slot);
    return chunk.room.reset();
  }
  bytes_ -= chunk.size;
  freed->chunks.push_back(std::exchange(chunk.bytes, {}));
}

void RetransmitBuffer::LeaveRooms(ChunkMemory* memory) {
  for (const auto& [micro, tensor] : order_) {
    for (Chunk& chunk : entries_[micro][tensor].chunks) {
      if (!chunk.room) continue;
      chunk.bytes = memory->Copy({chunk.room->data, chunk.size});
      chunk.room.reset();
      bytes_ += chunk.size;
    }
  }
  most_bytes_ = std::max(most_bytes_, bytes_);
}

void RetransmitBuffer::FreeAll(Freed* freed) {
  queue_.clear();
  queued_bytes_ = 0;
  for (const auto& [micro, tensor] : order_) {
    const Entry& entry = entries_[micro][tensor];
    const uint64_t end = entry.first + entry.chunks.size();
    for (uint64_t k = entry.first; k < end; ++k) Free({.micro = micro, .tensor = tensor, .chunk = k}, freed);
  }
}

std::optional<ChunkRef> RetransmitBuffer::Requeue(const std::function<bool(const ChunkRef&)>& held) {
  std::optional<ChunkRef> lost;
  queue_.clear();
  queued_bytes_ = 0;
  for (const auto& [micro, tensor] : order_) {
    const Entry& entry = entries_[micro][tensor];
    for (uint64_t k = 0; k < entry.chunks.size(); ++k) {
      const ChunkRef id{.micro = micro, .tensor = tensor, .chunk = entry.first + k};
      if (held(id)) continue;
      if (entry.chunks[k].freed) lost = id;
      queue_.push_back(id);
      queued_bytes_ += entry.chunks[k].size;
    }
  }
  return lost;
}

}  // namespace ballast
