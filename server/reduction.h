// The gradients of the open step on their way to being one: which contributions are in, what may be summed, and where.
// A contribution is one rank's gradient of one tensor in one micro-batch; it comes in chunks. A chunk is summed once
// every rank that covers it has delivered it or listed its tensor absent, over the ranks in rank order and then over
// the micro-batches in theirs, whatever the order of arrival: the sum's bits depend on nothing else.
//
// A tensor takes a slab of its pool with its first sum, or when it is wanted, and keeps it until its update has read
// it. What finds no slab, or waits for another rank, is held and counts against its rank's credit. Wanted names the
// chunk that a rank may send beyond its credit. At any time it is one and the same for all ranks, its slab is taken,
// and it stays until it is summed: else ranks could spend their one chunk beyond credit on different ones, each waiting
// for the others'.
//
// Bookkeeping only: payloads and sums are the caller's. Pure; strand-confined.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "server/coverage.h"
#include "server/reduce_pool.h"

namespace ballast {

struct ChunkId {
  uint32_t micro = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  auto operator<=>(const ChunkId&) const = default;
};

class Reduction {
 public:
  struct Options {
    std::vector<uint64_t> chunks;      // by tensor; at least 1
    std::vector<uint64_t> slab_bytes;  // by tensor
    std::vector<uint32_t> pool_of;     // by tensor
    // By pool. Each takes the largest slab of its tensors; where several micro-batches or a verdict come before the
    // updates, all of them.
    std::vector<uint64_t> pool_bytes;
  };
  // The chunk's payloads of these ranks, in this order, are added to the sum, or begin it; they are held no longer. No
  // ranks: nobody had any, and the sum is 0.
  struct Sum {
    ChunkId id;
    Slab slab;
    std::vector<uint32_t> ranks;
    bool first = false;
  };
  // Every contribution to the tensor is in its sum. No slab: it was absent everywhere.
  struct Complete {
    uint32_t tensor = 0;
    std::optional<Slab> slab = {};
  };
  // What became possible, in an order in which it may be carried out: sums first.
  struct Progress {
    std::vector<Sum> sums;
    std::vector<Complete> complete;
  };
  enum class Arrival { kNew, kAgain, kOther };  // kAgain: with the same checksum; kOther: with another one

  explicit Reduction(Options options);

  // A new step of this many ranks: nothing is delivered. Slabs of what was not complete are free again. Another number
  // of ranks than before: each covers everything.
  void Begin(uint32_t ranks);
  // What the rank contributes to from now on. It has said nothing of this step.
  void Cover(uint32_t rank, ChunkSet contributes) { covers_[rank] = std::move(contributes); }
  // The next micro-batch of the rank. All ranks name the same one as the last: the caller sees to it.
  void BeginMicro(uint32_t rank, bool last);
  // In the rank's present micro-batch, or again in one that it has ended.
  Arrival Deliver(uint32_t rank, ChunkId id, uint32_t crc);
  // The rank's present micro-batch has no other gradients than these; what is not absent may still be delivered.
  void EndMicro(uint32_t rank, std::vector<bool> absent);
  // What the rank has said of this step is as if it had not. False, and nothing is done: some of it is in a sum.
  bool Forget(uint32_t rank);
  // A slab of a complete tensor is free.
  void Release(uint32_t tensor, Slab slab);
  // After any of the above.
  Progress Advance();

  // The chunk that brings sums on, which the rank may send beyond its credit; none: it is not this rank that they wait
  // for. Costs a walk over all chunks when another than the last is to be wanted.
  std::optional<ChunkId> Wanted(uint32_t rank);

  const ChunkSet& covers(uint32_t rank) const { return covers_[rank]; }
  uint64_t covered(uint32_t rank, uint32_t tensor) const;  // its chunks that the rank contributes to
  bool all_complete() const { return complete_ == tensors_.size(); }
  uint32_t micros_begun(uint32_t rank) const { return static_cast<uint32_t>(ranks_[rank].micros.size()); }
  std::optional<uint32_t> last_micro(uint32_t rank) const { return ranks_[rank].last; }
  // Of a micro-batch that the rank has begun.
  bool ended(uint32_t rank, uint32_t micro) const { return ranks_[rank].micros[micro].ended; }
  const std::vector<bool>& absent(uint32_t rank, uint32_t micro) const { return ranks_[rank].micros[micro].absent; }
  uint64_t count(uint32_t rank, uint32_t micro, uint32_t tensor) const;               // chunks delivered
  std::vector<bool> Delivered(uint32_t rank, uint32_t micro, uint32_t tensor) const;  // by chunk

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
  std::vector<ReducePool> pools_;
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
};

}  // namespace ballast
