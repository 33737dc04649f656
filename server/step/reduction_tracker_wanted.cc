// Which chunk is wanted next. Every chunk whose turn it is lies in the sets that it belongs to, so that the first one
// is found without a walk over all chunks.
#include <algorithm>

#include "server/step/reduction_tracker.h"

namespace ballast {

void ReductionTracker::File(uint32_t tensor, size_t flat) {
  const Tensor& t = tensors_[tensor];
  if (t.complete) return;
  const uint32_t micro = summed_[flat], pool = options_.pool_of[tensor];
  const bool ready = MayBegin(micro) && TallyOf(micro).delivered[flat];
  Turn& turn = TurnOf(micro);
  ++work_;
  if (t.slab) {
    turn.placed.Insert(flat);
    if (ready) turn.placed_ready.Insert(flat);
  } else if (ready && !whole_[pool]) {
    small_ready_.Insert(flat);
    fits_[pool].Set(tensor, options_.slab_bytes[tensor]);
  } else if (ready && !taken_[tensor]) {
    turn.unplaced_ready.Insert(flat);
  }
}

void ReductionTracker::Unfile(uint32_t tensor, size_t flat) {
  Turn& turn = TurnOf(summed_[flat]);
  for (IndexSet* set : {&turn.placed, &turn.placed_ready, &turn.unplaced_ready}) set->Erase(flat);
  ++work_;
  if (!small_ready_.Contains(flat)) return;
  small_ready_.Erase(flat);
  const auto next = small_ready_.Next(first_chunk_[tensor]);
  if (next && *next < first_chunk_[tensor] + options_.chunks[tensor]) return;
  fits_[options_.pool_of[tensor]].Set(tensor, FirstFit::kNone);
}

void ReductionTracker::Refile(uint32_t tensor) {
  for (uint64_t c = 0; c < options_.chunks[tensor]; ++c) {
    Unfile(tensor, Flat(tensor, c));
    File(tensor, Flat(tensor, c));
  }
}

std::optional<ChunkId> ReductionTracker::Wanted(uint32_t rank) {
  ChooseWanted();
  if (!wanted_ || ranks_[rank].begun <= wanted_->micro || Settled(rank, *wanted_)) return std::nullopt;
  return wanted_;
}

// Every rank has begun the micro-batch: each will deliver the chunk or list it absent, whatever its credit.
void ReductionTracker::ChooseWanted() {
  if (wanted_ && Due(*wanted_)) return;
  wanted_ = First(&Turn::placed_ready);
  if (!wanted_) {
    const auto whole = First(&Turn::unplaced_ready), small = FirstOfSmallPools();
    wanted_ = whole && small ? std::min(whole, small) : whole ? whole : small;
  }
  if (!wanted_) wanted_ = First(&Turn::placed);
  if (wanted_ && !tensors_[wanted_->tensor].slab && Allocate(wanted_->tensor)) Wake(wanted_->tensor, &looks_);
}

std::optional<ChunkId> ReductionTracker::First(IndexSet Turn::*of) {
  for (uint32_t micro = oldest_; MayBegin(micro) && micro < begun_by_all_; ++micro) {
    ++work_;
    const auto flat = (TurnOf(micro).*of).Next(0);
    if (!flat) continue;
    const uint32_t tensor = TensorOf(*flat);
    return ChunkId{micro, tensor, *flat - first_chunk_[tensor]};
  }
  return std::nullopt;
}

std::optional<ChunkId> ReductionTracker::FirstOfSmallPools() {
  std::optional<ChunkId> first;
  if (begun_by_all_ == 0) return first;
  for (size_t p = 0; p < pools_.size(); ++p) {
    if (whole_[p]) continue;
    ++work_;
    const auto tensor = fits_[p].First(pools_[p].largest_hole());
    if (!tensor || (first && first->tensor < *tensor)) continue;
    const size_t flat = *small_ready_.Next(first_chunk_[*tensor]);
    first = ChunkId{0, static_cast<uint32_t>(*tensor), flat - first_chunk_[*tensor]};
  }
  return first;
}

bool ReductionTracker::Due(ChunkId id) const {
  return !tensors_[id.tensor].complete && summed_[Flat(id.tensor, id.chunk)] == id.micro;
}

}  // namespace ballast
