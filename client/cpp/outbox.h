// The host buffer of one step's gradients: what was pushed in each micro-batch, cut into chunks, until its weights are
// back. Chunks leave in the order of the pushes; after a lost connection those that the daemon does not hold are queued
// once more.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/types/span.h"

#include "client/cpp/tensor_table.h"

namespace ballast {

struct ChunkRef {
  uint32_t micro = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  bool operator==(const ChunkRef&) const = default;
};

// A copy of the gradient as chunks.
std::vector<std::string> CutIntoChunks(const TensorTable& tensors, uint32_t tensor,
                                       absl::Span<const std::byte> gradient);

class Outbox {
 public:
  // The first micro-batch has begun.
  explicit Outbox(uint32_t tensors) : tensors_(tensors) { BeginMicro(); }

  void BeginMicro() { entries_.emplace_back(tensors_); }
  uint32_t micro() const { return static_cast<uint32_t>(entries_.size()) - 1; }  // the present one
  bool pushed(uint32_t micro, uint32_t tensor) const { return entries_[micro][tensor].pushed; }
  bool pushed(uint32_t tensor) const;  // in any of them
  // In the present micro-batch.
  void Add(uint32_t tensor, std::vector<std::string> chunks);

  bool all_sent() const { return queue_.empty(); }
  const ChunkRef& next() const { return queue_.front(); }
  bool queued(const ChunkRef& id) const;
  uint64_t Bytes(const ChunkRef& id) const { return entries_[id.micro][id.tensor].chunks[id.chunk].size(); }

  // Lends the bytes of a queued chunk to the writer, who brings them back.
  std::string Lend(const ChunkRef& id);
  void BringBack(const ChunkRef& id, std::string bytes);

  // The tensor's chunks, for the caller to destroy where that may take its time.
  std::vector<std::string> Free(uint32_t tensor);
  // Queues again all that is not freed and not held by the daemon. Nothing may be lent.
  void Requeue(const std::function<bool(const ChunkRef&)>& held);
  void DropQueue() { queue_.clear(); }

 private:
  struct Entry {
    bool pushed = false;
    std::vector<std::string> chunks;  // empty when freed
  };
  struct Push {
    uint32_t micro = 0, tensor = 0;
  };
  const uint32_t tensors_;
  std::vector<std::vector<Entry>> entries_;  // by micro-batch and tensor
  std::vector<Push> order_;                  // of the pushes
  std::deque<ChunkRef> queue_;
};

}  // namespace ballast
