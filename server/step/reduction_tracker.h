// How the ranks' gradients of the open step become one: which contributions have arrived, what may be summed, and
// where. A contribution is one rank's gradient of one tensor in one micro-batch; it comes in chunks. A chunk is summed
// once every rank that covers it, in part or whole, has delivered that or listed its tensor absent. It is summed over
// the ranks in rank order, and then over the micro-batches in theirs, whatever the order of arrival: the sum's bits
// depend on nothing else.
//
// A rank may be at most kMostLive micro-batches past the last one that is wholly summed, and accounts are kept of no
// more of them: everything earlier was summed or listed absent, whatever is said of it again. So the accounts do not
// grow with the number of micro-batches; BytesAtMost says what they take.
//
// A tensor takes a slab of its pool with its first sum, or when it is wanted, and keeps it until its update has read
// it. A chunk that finds no slab, or waits for another rank, is held and counts against its rank's credit. Wanted names
// the chunk that a rank may send beyond its credit. At any time that is the same chunk for all ranks, its slab is
// taken, and it stays wanted until it is summed. Otherwise ranks could spend their one chunk beyond credit on different
// chunks, each waiting for the others'.
//
// So a step whose tensors are updated as they complete ends with any pool that has room for its largest slab, and with
// any credit, none included, if each rank sends what is wanted of it and the device answers. While something is not
// summed and every rank has begun:
//   1. While a tensor that is not complete has a slab, a chunk is wanted that has one too. It needs nothing but the
//      ranks, each of which covers it and sends it beyond its credit, or lists it absent, or does not cover it. Then it
//      is summed, and fewer chunks are left.
//   2. Else updates have all slabs that are taken. They wait for nothing, so the pool becomes one hole, into which any
//      slab goes. If some rank has delivered a chunk that waits, its tensor takes a slab: 1.
//   3. Else nothing waits, so all credit is back, and whoever has something left may send it, whatever its size: 2.
// Which ranks cover a chunk, who is left out, and how late ranks and the device are does not enter. Where slabs outlive
// that, for several micro-batches or a verdict, 2 fails, and the pool must take all.
//
// Bookkeeping only: payloads and sums are the caller's. Pure; strand-confined. The cost of a call grows only with the
// logarithm of the number of chunks, except for calls that concern a whole micro-batch or step.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"

#include "server/base/first_fit.h"
#include "server/base/index_set.h"
#include "server/step/coverage.h"
#include "server/step/slab_allocator.h"

namespace ballast {

struct ChunkId {
  uint32_t micro = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  auto operator<=>(const ChunkId&) const = default;
};

class ReductionTracker {
 public:
  static constexpr uint32_t kMostLive = 2;

  struct Options {
    std::vector<uint64_t> chunks;      // by tensor; at least 1
    std::vector<uint64_t> slab_bytes;  // by tensor
    std::vector<uint32_t> pool_of;     // by tensor
    // By pool. A pool has room at least for the largest slab of its tensors, and for all of them where several
    // micro-batches or a verdict come before the updates.
    std::vector<uint64_t> pool_bytes;
    uint32_t micros = kMostLive;  // of a step, at most
  };
  // The chunk's payloads of these ranks are added to the sum in this order, or begin it (`first`); they are no longer
  // held. No ranks: nobody delivered the chunk, and the sum is 0.
  struct Sum {
    ChunkId id;
    Slab slab;
    absl::InlinedVector<uint32_t, 4> ranks;
    bool first = false;
  };
  // Every contribution to the tensor is in its sum. No slab: it was absent everywhere.
  struct Complete {
    uint32_t tensor = 0;
    std::optional<Slab> slab = {};
  };
  // What became possible, in an order in which it may be carried out: sums first.
  struct Progress {
    absl::InlinedVector<Sum, 1> sums;
    absl::InlinedVector<Complete, 1> complete;
  };
  enum class Arrival { kNew, kAgain, kOther };  // kAgain: with the same checksum; kOther: with another one

  explicit ReductionTracker(Options options);
  // What the size of a run's accounts depends on.
  struct Size {
    uint64_t ranks = 1, micros = 1, tensors = 1, chunks = 1, pools = 1;
    uint64_t parts = 0;  // chunks that a rank may contribute to in part
  };
  static uint64_t BytesAtMost(const Size& size);

  // Begins a new step of so many ranks, some of which may be left out. Nothing is delivered yet; the slabs of tensors
  // that were not complete are free again. If the number of ranks differs from before, each rank covers everything.
  void Begin(const std::vector<bool>& left_out);
  void Begin(uint32_t ranks) { Begin(std::vector<bool>(ranks)); }
  // What the rank contributes to from now on. Requires that it has delivered and listed nothing in this step.
  void Cover(uint32_t rank, ChunkSet contributes) { covers_[rank] = std::move(contributes); }
  // Makes this step without the rank; Begin decides anew for the next one. Requires that the rank has delivered and
  // listed nothing in this step, that nothing is summed, and that another rank takes part.
  void LeaveOut(uint32_t rank);
  bool left_out(uint32_t rank) const { return ranks_[rank].left_out; }
  // Whether a rank may begin the micro-batch now, or must wait until an earlier one is wholly summed.
  bool MayBegin(uint32_t micro) const { return micro < oldest_ + live_; }
  // Begins the rank's next micro-batch. Requires MayBegin; the caller sees to it that all ranks name the same one last.
  void BeginMicro(uint32_t rank, bool last);
  // Makes the rank's present micro-batch its last, though it did not begin as such; perhaps it is summed already.
  // Requires that the rank has begun one, and named none last.
  void NameLast(uint32_t rank);
  // Takes a chunk of the rank's present micro-batch, or once more one of a micro-batch that it has ended. crc: of its payload; 0:
  // it is not known, and taken for that of the payload before.
  Arrival Deliver(uint32_t rank, ChunkId id, uint32_t crc);
  // Lists what the rank's present micro-batch has no gradients of. What is not absent may still be delivered.
  void EndMicro(uint32_t rank, std::vector<bool> absent);
  // Undoes everything that the rank delivered and listed in this step. False, and nothing is done: some of it is in a
  // sum.
  bool Forget(uint32_t rank);
  // Frees the slab of a complete tensor.
  void Release(uint32_t tensor, Slab slab);
  // What became possible. To be called after each of the calls above.
  Progress Advance();

  // The chunk that sums wait for, which the rank may send beyond its credit; none: they do not wait for this rank.
  // Every rank will deliver this chunk or list it absent, whatever its credit. It is the lowest, by micro-batch, tensor
  // and chunk, among the delivered chunks whose tensor has a slab; if there are none, among the delivered chunks whose
  // tensor could take one; if there are none, among all chunks whose tensor has a slab.
  std::optional<ChunkId> Wanted(uint32_t rank);

  const ChunkSet& covers(uint32_t rank) const { return covers_[rank]; }
  uint64_t covered(uint32_t rank, uint32_t tensor) const;  // its chunks that the rank contributes to
  bool all_complete() const { return complete_ == tensors_.size(); }
  uint32_t micros_begun(uint32_t rank) const { return ranks_[rank].begun; }
  std::optional<uint32_t> last_micro(uint32_t rank) const { return ranks_[rank].last; }
  // How many micro-batches, from 0 on, are wholly summed.
  uint32_t micros_summed() const { return oldest_; }
  // Whether the accounts of a micro-batch that the rank has begun are still kept. If not, the rank has ended it, and it
  // is wholly summed.
  bool kept(uint32_t rank, uint32_t micro) const { return micro + live_ >= ranks_[rank].begun; }
  bool ended(uint32_t rank, uint32_t micro) const { return !kept(rank, micro) || At(rank, micro).ended; }
  // By tensor, what the rank listed absent in a micro-batch that is kept.
  const std::vector<bool>& absent(uint32_t rank, uint32_t micro) const { return At(rank, micro).absent; }
  uint64_t count(uint32_t rank, uint32_t micro, uint32_t tensor) const;  // chunks delivered
  // How many chunks of a micro-batch the rank has begun, but has neither delivered nor listed absent.
  uint64_t lacking(uint32_t rank, uint32_t micro) const { return kept(rank, micro) ? At(rank, micro).left : 0; }
  std::vector<bool> Delivered(uint32_t rank, uint32_t micro, uint32_t tensor) const;  // by chunk

  // Chunks, ranks and sets looked at so far: what the calls cost.
  uint64_t work() const { return work_; }

 private:
  // What one rank did in a micro-batch.
  struct Micro {
    bool ended = false;
    uint64_t left = 0;            // chunks neither delivered nor absent
    std::vector<bool> delivered;  // by flat chunk
    std::vector<uint32_t> crc;    // of what is delivered
    std::vector<bool> absent;     // by tensor; empty until ended
  };
  struct Rank {
    uint32_t begun = 0;
    bool left_out = false;
    std::optional<uint32_t> last;
    std::vector<Micro> live;  // by micro-batch, modulo live_
  };
  // What all ranks did in a micro-batch that is not wholly summed.
  struct Tally {
    std::vector<uint16_t> settled;  // by flat chunk: ranks that delivered it, or never will
    std::vector<bool> delivered;    // by flat chunk: by any rank
    uint64_t left = 0;              // chunks not summed
  };
  // The chunks whose turn it is in one micro-batch, of tensors that are not complete.
  struct Turn {
    IndexSet placed;          // the tensor has a slab
    IndexSet placed_ready;    // and some rank has delivered the chunk
    IndexSet unplaced_ready;  // delivered, and the tensor has none; its place in a whole pool is free
  };
  struct Tensor {
    std::optional<Slab> slab;
    bool summed = false;  // some of it
    bool complete = false;
    uint64_t chunks_left = 0;  // not yet summed through the last micro-batch
  };

  size_t Flat(uint32_t tensor, uint64_t chunk) const { return first_chunk_[tensor] + chunk; }
  uint32_t TensorOf(size_t flat) const;
  Micro& At(uint32_t rank, uint32_t micro) { return ranks_[rank].live[micro % live_]; }
  const Micro& At(uint32_t rank, uint32_t micro) const { return ranks_[rank].live[micro % live_]; }
  Tally& TallyOf(uint32_t micro) { return tallies_[micro % live_]; }
  const Tally& TallyOf(uint32_t micro) const { return tallies_[micro % live_]; }
  Turn& TurnOf(uint32_t micro) { return turns_[micro % turns_.size()]; }
  bool Allocate(uint32_t tensor);
  void Free(uint32_t tensor, Slab slab);
  // The chunk found no slab. Wake has the tensor's chunks that found none looked at again.
  void Wait(uint32_t tensor, size_t flat);
  void Wake(uint32_t tensor, IndexSet* looks);
  uint32_t ranks() const { return static_cast<uint32_t>(ranks_.size()); }
  bool Settled(uint32_t rank, ChunkId id) const;
  // One more rank has delivered the chunk, or never will.
  void Settle(uint32_t micro, size_t flat);
  void ClearTallies();
  // Counts the tallies anew from what is kept of the ranks. Requires that nothing is summed.
  void CountAgain();
  // Puts the chunk where ChooseWanted finds it, after anything about it changed; Unfile takes it out before a change.
  void File(uint32_t tensor, size_t flat);
  void Unfile(uint32_t tensor, size_t flat);
  void Refile(uint32_t tensor);  // all of its chunks
  void CountBegun();
  std::optional<uint32_t> Last() const;  // as the first rank that takes part has said; none: not yet
  void ChooseWanted();
  std::optional<ChunkId> First(IndexSet Turn::*of);
  std::optional<ChunkId> FirstOfSmallPools();
  bool Due(ChunkId id) const;  // not summed, and its micro-batch's turn
  // The next chunk to look at: of looking_, or of those that wait for a slab, of tensors from `from` on, and find one now.
  std::optional<size_t> NextLook(uint32_t from);
  // Sums as much of the chunk as may be summed. False: its tensor finds no slab.
  bool AdvanceChunk(uint32_t tensor, uint64_t chunk, Progress* progress);
  // The chunk is summed in its micro-batch: the turn passes to the next micro-batch.
  void PassOn(uint32_t tensor, size_t flat);
  void Finish(uint32_t tensor, Progress* progress);
  // After the last micro-batch has become known: finishes the tensors that are summed through it.
  void FinishSummed(Progress* progress);

  const Options options_;
  std::vector<size_t> first_chunk_;  // by tensor: its first flat chunk
  const uint32_t live_;              // micro-batches kept account of
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
  std::vector<bool> started_;     // by flat chunk: its sum has a term
  uint32_t oldest_ = 0;           // micro-batch that is not wholly summed
  uint32_t begun_by_all_ = 0;     // micro-batches
  uint32_t taking_part_ = 0;      // ranks
  std::vector<Tally> tallies_;    // by micro-batch, modulo live_; from oldest_ on
  std::vector<Turn> turns_;       // likewise, and one more
  IndexSet small_ready_;          // as unplaced_ready, of tensors in pools that are not whole: one micro-batch
  std::vector<FirstFit> fits_;    // by pool that is not whole: slab bytes by tensor that has chunks in small_ready_
  IndexSet looks_, looking_;      // flat chunks of which something may be summed now
  IndexSet waiting_;              // those that found no slab
  std::vector<FirstFit> waits_;   // by pool that is not whole: slab bytes by tensor that has chunks in waiting_
  std::vector<bool> freed_;       // by pool that is not whole: a slab came back since those that wait were looked at
  std::vector<bool> looked_;      // the same, of what Advance looks at now
  std::optional<ChunkId> wanted_;
  size_t complete_ = 0;
  bool any_summed_ = false;
  bool last_named_ = false;  // since Advance: chunks that are summed through the last micro-batch may not be counted so
  uint64_t work_ = 0;
};

}  // namespace ballast
