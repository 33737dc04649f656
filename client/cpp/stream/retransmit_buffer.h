// The host buffer of one step's gradients: it keeps what was pushed in each micro-batch, cut into chunks, until the
// daemon has acknowledged them. Chunks leave in the order of the pushes; after a lost connection those that the daemon
// does not hold are queued once more. A chunk that was sent as it was pushed lies in the transport's room instead.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

#include "client/cpp/stream/chunk_memory.h"
#include "client/cpp/transport/transport.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

struct ChunkRef {
  uint32_t micro = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  bool operator==(const ChunkRef&) const = default;
};

// What is no longer needed: memory, and the transport's slots.
struct Freed {
  std::vector<std::string> chunks;
  std::vector<uint32_t> slots;
};

// What was freed under a lock; the memory goes back when that is open again.
class FreedChunks {
 public:
  explicit FreedChunks(ChunkMemory* memory) : memory_(memory) {}
  ~FreedChunks() { memory_->Keep(&freed_.chunks); }
  FreedChunks(const FreedChunks&) = delete;
  FreedChunks& operator=(const FreedChunks&) = delete;

  Freed* get() { return &freed_; }

 private:
  ChunkMemory* const memory_;
  Freed freed_;
};

// What a chunk has of the gradient, which is of the tensor's shard.
absl::Span<const std::byte> CutChunk(const TensorTable& tensors, uint32_t tensor, uint64_t chunk,
                                     absl::Span<const std::byte> gradient);
// A copy of chunks [first, last) of it.
std::vector<std::string> CutIntoChunks(const TensorTable& tensors, uint32_t tensor, uint64_t first, uint64_t last,
                                       absl::Span<const std::byte> gradient, ChunkMemory* memory);

class RetransmitBuffer {
 public:
  // The first micro-batch has begun.
  explicit RetransmitBuffer(uint32_t tensors) : tensors_(tensors) { BeginMicro(); }

  void BeginMicro() { entries_.emplace_back(tensors_); }
  uint32_t micro() const { return static_cast<uint32_t>(entries_.size()) - 1; }  // the present one
  bool pushed(uint32_t micro, uint32_t tensor) const { return entries_[micro][tensor].pushed; }
  bool pushed(uint32_t tensor) const;  // in any of them
  // In the present micro-batch, the tensor's chunks, all at once or a few at a time, each time those that follow. `first`: the
  // number of the very first.
  void Add(uint32_t tensor, uint64_t first, std::vector<std::string> chunks);
  // Likewise one chunk, which is not queued, since it is being sent; it lies in the room.
  ChunkRef AddSent(uint32_t tensor, uint64_t first, uint64_t bytes, const GradientRoom& room);

  bool all_sent() const { return queue_.empty(); }
  const ChunkRef& next() const { return queue_.front(); }
  bool queued(const ChunkRef& id) const;
  // Whether the chunk was pushed.
  bool has(const ChunkRef& id) const;
  uint64_t queued_bytes() const { return queued_bytes_; }
  uint64_t Bytes(const ChunkRef& id) const {
    const Entry& entry = entries_[id.micro][id.tensor];
    return entry.chunks[id.chunk - entry.first].size;
  }
  uint64_t bytes() const { return bytes_; }            // kept here, those lent too
  uint64_t most_bytes() const { return most_bytes_; }  // likewise, at one time, so far

  // Of the bytes, as they were when they were sent from a room, which the daemon may write to; 0: not known.
  void SetChecksum(const ChunkRef& id, uint32_t crc32c) { At(id).crc32c = crc32c; }
  uint32_t Checksum(const ChunkRef& id) const {
    const Entry& entry = entries_[id.micro][id.tensor];
    return entry.chunks[id.chunk - entry.first].crc32c;
  }

  // Lends the bytes of a queued chunk to the writer, who brings them back. If the chunk was freed meanwhile, they stay
  // in *bytes.
  std::string Lend(const ChunkRef& id);
  void BringBack(const ChunkRef& id, std::string* bytes);

  // Frees one chunk, or all of the step, whose queue is empty then. The memory is added to *freed, for the caller to
  // destroy where that may take its time.
  void Free(const ChunkRef& id, Freed* freed);
  void FreeAll(Freed* freed);
  // Copies what lies in a transport's room, which is about to go.
  void LeaveRooms(ChunkMemory* memory);
  // Queues again all that the daemon does not hold. Nothing may be lent, or lie in a room. A chunk that was freed and is
  // not held is returned: it is lost.
  std::optional<ChunkRef> Requeue(const std::function<bool(const ChunkRef&)>& held);

 private:
  struct Chunk {
    std::string bytes;  // empty while lent, or where there is a room
    uint64_t size = 0;
    bool freed = false;
    std::optional<GradientRoom> room = {};
    uint32_t crc32c = 0;
  };
  struct Entry {
    bool pushed = false;
    uint64_t first = 0;
    absl::InlinedVector<Chunk, 1> chunks;
  };
  Chunk& At(const ChunkRef& id) {
    Entry& entry = entries_[id.micro][id.tensor];
    return entry.chunks[id.chunk - entry.first];
  }
  Entry& Begin(uint32_t tensor, uint64_t first);
  struct Push {
    uint32_t micro = 0, tensor = 0;
  };
  const uint32_t tensors_;
  std::vector<std::vector<Entry>> entries_;  // by micro-batch and tensor
  std::vector<Push> order_;                  // of the pushes
  std::deque<ChunkRef> queue_;
  uint64_t queued_bytes_ = 0;
  uint64_t bytes_ = 0, most_bytes_ = 0;
};

}  // namespace ballast
