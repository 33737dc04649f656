// The reduction as plainly as it can be written: every choice is a walk over all chunks, and everything that was said
// is kept. What server/step/reduction_tracker.h does must be the same, to the order of its sums. Contracts are there.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "server/step/reduction_tracker.h"

namespace ballast {

class WalkingReduction {
 public:
  using Options = ReductionTracker::Options;
  using Sum = ReductionTracker::Sum;
  using Complete = ReductionTracker::Complete;
  using Progress = ReductionTracker::Progress;
  using Arrival = ReductionTracker::Arrival;

  explicit WalkingReduction(Options options);

  void Begin(uint32_t ranks);
  void Cover(uint32_t rank, ChunkSet contributes) { covers_[rank] = std::move(contributes); }
  void BeginMicro(uint32_t rank, bool last);
  void NameLast(uint32_t rank);
  Arrival Deliver(uint32_t rank, ChunkId id, uint32_t crc);
  void EndMicro(uint32_t rank, std::vector<bool> absent);
  bool Forget(uint32_t rank);
  void Release(uint32_t tensor, Slab slab);
  Progress Advance();

  std::optional<ChunkId> Wanted(uint32_t rank);

 private:
  struct Micro {
    bool ended = false;
    std::vector<std::optional<uint32_t>> crc;  // by flat chunk; set when delivered
    std::vector<uint64_t> count;               // by tensor
    std::vector<bool> absent;                  // by tensor; empty until ended
  };
  struct Rank {
    std::vector<Micro> micros;
    std::optional<uint32_t> last;
  };
  struct Tensor {
    std::optional<Slab> slab;
    bool summed = false;  // some of it
    bool complete = false;
    uint64_t chunks_left = 0;  // not yet summed through the last micro-batch
  };

  size_t Flat(uint32_t tensor, uint64_t chunk) const { return first_chunk_[tensor] + chunk; }
  bool Fits(uint32_t tensor) const;
  std::optional<Slab> Allocate(uint32_t tensor);
  void Free(uint32_t tensor, Slab slab);
  uint32_t ranks() const { return static_cast<uint32_t>(ranks_.size()); }
  bool Settled(uint32_t rank, ChunkId id) const;
  bool Ready(ChunkId id) const;
  bool DeliveredByAny(ChunkId id) const;
  void ChooseWanted();
  // The lowest chunk that is due, of the tensors that have a slab or that could take one.
  std::optional<ChunkId> Lowest(bool with_slab, bool delivered) const;
  bool BegunByAll(uint32_t micro) const;
  bool Due(ChunkId id) const;                           // not summed, and its micro-batch's turn
  bool Started(uint32_t tensor, uint64_t chunk) const;  // its sum has a term
  // Sums what of the chunk may be summed. False: its tensor finds no slab.
  bool AdvanceChunk(uint32_t tensor, uint64_t chunk, Progress* progress);
  void Finish(uint32_t tensor, Progress* progress);

  const Options options_;
  std::vector<size_t> first_chunk_;  // by tensor: its first flat chunk
  std::vector<SlabAllocator> pools_;
  // A pool that takes all of its tensors at once gives each its own place: when none is free until all are complete,
  // first-fit around slabs that the last step's updates still read could leave holes too small for the rest.
  std::vector<bool> whole_;   // by pool
  std::vector<Slab> places_;  // by tensor; of a whole pool
  std::vector<bool> taken_;   // by tensor; its place
  std::vector<Rank> ranks_;
  std::vector<ChunkSet> covers_;  // by rank
  std::vector<Tensor> tensors_;
  std::vector<uint32_t> summed_;  // by flat chunk: micro-batches
  struct Spot {
    uint32_t tensor = 0;
    uint64_t chunk = 0;
    auto operator<=>(const Spot&) const = default;
  };
  std::vector<Spot> looks_;    // chunks of which something may be summed now
  std::vector<Spot> waiting_;  // chunks that found no slab
  std::optional<ChunkId> wanted_;
  size_t complete_ = 0;
  bool any_summed_ = false;
  bool last_named_ = false;
};

}  // namespace ballast
