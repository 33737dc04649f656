#include "client/cpp/outbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ballast {

std::vector<std::string> CutIntoChunks(const TensorTable& tensors, uint32_t tensor,
                                       absl::Span<const std::byte> gradient) {
  const WireTensor& wire = tensors[tensor];
  const size_t chunk_bytes = tensors.chunk_elements() * wire.gradient_element_bytes;
  std::vector<std::string> chunks;
  chunks.reserve(wire.chunks);
  for (uint64_t k = 0; k < wire.chunks; ++k) {
    const auto piece = gradient.subspan(k * chunk_bytes, chunk_bytes);
    chunks.emplace_back(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return chunks;
}

bool Outbox::pushed(uint32_t tensor) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& micro) { return micro[tensor].pushed; });
}

void Outbox::Add(uint32_t tensor, std::vector<std::string> chunks) {
  for (uint64_t k = 0; k < chunks.size(); ++k) queue_.push_back({.micro = micro(), .tensor = tensor, .chunk = k});
  entries_.back()[tensor] = {.pushed = true, .chunks = std::move(chunks)};
  order_.push_back({micro(), tensor});
}

bool Outbox::queued(const ChunkRef& id) const { return std::find(queue_.begin(), queue_.end(), id) != queue_.end(); }

std::string Outbox::Lend(const ChunkRef& id) {
  queue_.erase(std::find(queue_.begin(), queue_.end(), id));
  return std::move(entries_[id.micro][id.tensor].chunks[id.chunk]);
}

void Outbox::BringBack(const ChunkRef& id, std::string bytes) {
  std::vector<std::string>& chunks = entries_[id.micro][id.tensor].chunks;
  if (id.chunk < chunks.size()) chunks[id.chunk] = std::move(bytes);
}

std::vector<std::string> Outbox::Free(uint32_t tensor) {
  std::vector<std::string> all;
  for (std::vector<Entry>& micro : entries_) {
    std::vector<std::string> chunks = std::exchange(micro[tensor].chunks, {});
    std::move(chunks.begin(), chunks.end(), std::back_inserter(all));
  }
  return all;
}

void Outbox::Requeue(const std::function<bool(const ChunkRef&)>& held) {
  queue_.clear();
  for (const auto& [micro, tensor] : order_) {
    for (uint64_t k = 0; k < entries_[micro][tensor].chunks.size(); ++k) {
      const ChunkRef id{.micro = micro, .tensor = tensor, .chunk = k};
      if (!held(id)) queue_.push_back(id);
    }
  }
}

}  // namespace ballast
