#include "tests/server/step/walking_reduction.h"

#include <algorithm>
#include <utility>

namespace ballast {

WalkingReduction::WalkingReduction(Options options) : options_(std::move(options)), tensors_(options_.chunks.size()) {
  size_t first = 0;
  for (const uint64_t chunks : options_.chunks) {
    first_chunk_.push_back(first);
    first += chunks;
  }
  summed_.resize(first);
  for (const uint64_t bytes : options_.pool_bytes) pools_.emplace_back(bytes, tensors_.size());
  std::vector<uint64_t> ends(pools_.size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    uint64_t& end = ends[options_.pool_of[i]];
    places_.push_back({.offset = end, .bytes = options_.slab_bytes[i]});
    end += options_.slab_bytes[i];
  }
  for (size_t p = 0; p < pools_.size(); ++p) whole_.push_back(ends[p] <= options_.pool_bytes[p]);
  taken_.resize(tensors_.size());
}

bool WalkingReduction::Fits(uint32_t tensor) const {
  const uint32_t pool = options_.pool_of[tensor];
  return whole_[pool] ? !taken_[tensor] : pools_[pool].Fits(options_.slab_bytes[tensor]);
}

std::optional<Slab> WalkingReduction::Allocate(uint32_t tensor) {
  const uint32_t pool = options_.pool_of[tensor];
  if (!whole_[pool]) return pools_[pool].Allocate(options_.slab_bytes[tensor]);
  if (taken_[tensor]) return std::nullopt;  // the last step's update reads it
  taken_[tensor] = true;
  return places_[tensor];
}

void WalkingReduction::Free(uint32_t tensor, Slab slab) {
  const uint32_t pool = options_.pool_of[tensor];
  if (whole_[pool]) {
    taken_[tensor] = false;
  } else {
    pools_[pool].Free(slab);
  }
}

void WalkingReduction::Begin(uint32_t ranks) {
  ranks_.assign(ranks, {});
  if (covers_.size() != ranks) covers_.assign(ranks, {});
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].slab) Free(i, *tensors_[i].slab);
    tensors_[i] = {.slab = std::nullopt, .chunks_left = options_.chunks[i]};
  }
  std::fill(summed_.begin(), summed_.end(), 0);
  looks_.clear();
  waiting_.clear();
  wanted_.reset();
  complete_ = 0;
  any_summed_ = last_named_ = false;
}

void WalkingReduction::BeginMicro(uint32_t rank, bool last) {
  Rank& r = ranks_[rank];
  if (last) r.last = static_cast<uint32_t>(r.micros.size());
  r.micros.push_back(
      {.crc = std::vector<std::optional<uint32_t>>(summed_.size()), .count = std::vector<uint64_t>(tensors_.size())});
  if (covers_[rank].empty()) return;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    for (uint64_t c = 0; c < options_.chunks[i]; ++c) {
      if (!Contains(covers_[rank], i, c)) looks_.push_back({i, c});
    }
  }
}

void WalkingReduction::NameLast(uint32_t rank) {
  ranks_[rank].last = static_cast<uint32_t>(ranks_[rank].micros.size()) - 1;
  last_named_ = last_named_ || rank == 0;
}

WalkingReduction::Arrival WalkingReduction::Deliver(uint32_t rank, ChunkId id, uint32_t crc) {
  Micro& micro = ranks_[rank].micros[id.micro];
  std::optional<uint32_t>& known = micro.crc[Flat(id.tensor, id.chunk)];
  if (known) return known == crc || known == 0 || crc == 0 ? Arrival::kAgain : Arrival::kOther;
  known = crc;
  ++micro.count[id.tensor];
  looks_.push_back({id.tensor, id.chunk});
  return Arrival::kNew;
}

void WalkingReduction::EndMicro(uint32_t rank, std::vector<bool> absent) {
  Micro& micro = ranks_[rank].micros.back();
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!absent[i]) continue;
    for (uint64_t c = 0; c < options_.chunks[i]; ++c) looks_.push_back({i, c});
  }
  micro.absent = std::move(absent);
  micro.ended = true;
}

bool WalkingReduction::Forget(uint32_t rank) {
  // A sum has a part of every rank in it, or what the rank said of having none.
  if (any_summed_) return false;
  ranks_[rank] = {};
  return true;
}

void WalkingReduction::Release(uint32_t tensor, Slab slab) {
  Free(tensor, slab);
  looks_.insert(looks_.end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
}

bool WalkingReduction::Settled(uint32_t rank, ChunkId id) const {
  const Rank& r = ranks_[rank];
  if (r.micros.size() <= id.micro) return false;
  if (!Contains(covers_[rank], id.tensor, id.chunk)) return true;
  const Micro& micro = r.micros[id.micro];
  return micro.crc[Flat(id.tensor, id.chunk)].has_value() || (micro.ended && micro.absent[id.tensor]);
}

bool WalkingReduction::Ready(ChunkId id) const {
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (!Settled(rank, id)) return false;
  }
  return true;
}

WalkingReduction::Progress WalkingReduction::Advance() {
  Progress progress;
  const bool named = std::exchange(last_named_, false) && ranks_[0].last;
  for (uint32_t i = 0; named && i < tensors_.size(); ++i) {
    for (uint64_t c = 0; c < options_.chunks[i]; ++c) {
      if (summed_[Flat(i, c)] > *ranks_[0].last && --tensors_[i].chunks_left == 0) Finish(i, &progress);
    }
  }
  while (!looks_.empty()) {  // a tensor that turns out to be absent everywhere may free a slab on the way
    // In order, so that the same state gives the same sums.
    std::sort(looks_.begin(), looks_.end());
    looks_.erase(std::unique(looks_.begin(), looks_.end()), looks_.end());
    for (const Spot& spot : std::exchange(looks_, {})) {
      if (!AdvanceChunk(spot.tensor, spot.chunk, &progress)) waiting_.push_back(spot);
    }
  }
  return progress;
}

bool WalkingReduction::AdvanceChunk(uint32_t tensor, uint64_t chunk, Progress* progress) {
  Tensor& t = tensors_[tensor];
  uint32_t& summed = summed_[Flat(tensor, chunk)];
  while (!t.complete && Ready({summed, tensor, chunk})) {
    Sum sum{.id = {summed, tensor, chunk}};
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (ranks_[rank].micros[summed].crc[Flat(tensor, chunk)]) sum.ranks.push_back(rank);
    }
    if (!sum.ranks.empty()) {
      if (!t.slab) t.slab = Allocate(tensor);
      if (!t.slab) return false;
      sum.slab = *t.slab;
      sum.first = !Started(tensor, chunk);
      t.summed = true;
      progress->sums.push_back(std::move(sum));
    }
    any_summed_ = true;
    if (ranks_[0].last != summed++) continue;
    if (--t.chunks_left > 0) return true;
    Finish(tensor, progress);
  }
  return true;
}

void WalkingReduction::Finish(uint32_t tensor, Progress* progress) {
  Tensor& t = tensors_[tensor];
  t.complete = true;
  ++complete_;
  const auto slab = std::exchange(t.slab, std::nullopt);
  if (slab && !t.summed) Release(tensor, *slab);  // who had a gradient is gone, and its next process has none
  for (uint64_t c = 0; t.summed && c < options_.chunks[tensor]; ++c) {
    if (Started(tensor, c)) continue;  // else those that cover it had listed the tensor absent
    progress->sums.push_back({.id = {*ranks_[0].last, tensor, c}, .slab = *slab, .ranks = {}, .first = true});
  }
  progress->complete.push_back({tensor, t.summed ? slab : std::nullopt});
}

// Whether an earlier micro-batch has put a term into the chunk's sum.
bool WalkingReduction::Started(uint32_t tensor, uint64_t chunk) const {
  const uint32_t summed = summed_[Flat(tensor, chunk)];
  for (const Rank& rank : ranks_) {
    for (uint32_t m = 0; m < summed; ++m) {
      if (rank.micros[m].crc[Flat(tensor, chunk)]) return true;
    }
  }
  return false;
}

std::optional<ChunkId> WalkingReduction::Wanted(uint32_t rank) {
  ChooseWanted();
  if (!wanted_ || ranks_[rank].micros.size() <= wanted_->micro || Settled(rank, *wanted_)) return std::nullopt;
  return wanted_;
}

// Every rank has begun the micro-batch: each will deliver the chunk or list it absent, whatever its credit.
void WalkingReduction::ChooseWanted() {
  if (wanted_ && Due(*wanted_)) return;
  wanted_ = Lowest(/*with_slab=*/true, /*delivered=*/true);
  if (!wanted_) wanted_ = Lowest(/*with_slab=*/false, /*delivered=*/true);
  if (!wanted_) wanted_ = Lowest(/*with_slab=*/true, /*delivered=*/false);
  if (!wanted_) return;
  Tensor& t = tensors_[wanted_->tensor];
  if (!t.slab) t.slab = Allocate(wanted_->tensor);
}

std::optional<ChunkId> WalkingReduction::Lowest(bool with_slab, bool delivered) const {
  std::optional<ChunkId> lowest;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].slab.has_value() != with_slab) continue;
    if (!with_slab && !Fits(i)) continue;
    for (uint64_t c = 0; c < options_.chunks[i]; ++c) {
      const ChunkId id{summed_[Flat(i, c)], i, c};
      if ((lowest && *lowest < id) || !Due(id) || !BegunByAll(id.micro)) continue;
      if (!delivered || DeliveredByAny(id)) lowest = id;
    }
  }
  return lowest;
}

bool WalkingReduction::BegunByAll(uint32_t micro) const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return rank.micros.size() > micro; });
}

bool WalkingReduction::Due(ChunkId id) const {
  return !tensors_[id.tensor].complete && summed_[Flat(id.tensor, id.chunk)] == id.micro;
}

bool WalkingReduction::DeliveredByAny(ChunkId id) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    return rank.micros.size() > id.micro && rank.micros[id.micro].crc[Flat(id.tensor, id.chunk)];
  });
}

}  // namespace ballast
