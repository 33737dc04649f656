#include "server/reduction.h"

#include <algorithm>
#include <utility>

namespace ballast {

Reduction::Reduction(Options options) : options_(std::move(options)), tensors_(options_.chunks.size()) {
  size_t first = 0;
  for (const uint64_t chunks : options_.chunks) {
    first_chunk_.push_back(first);
    first += chunks;
  }
  summed_.resize(first);
  for (const uint64_t bytes : options_.pool_bytes) pools_.emplace_back(bytes, tensors_.size());
}

void Reduction::Begin(uint32_t ranks) {
  ranks_.assign(ranks, {});
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].slab) PoolOf(i).Free(*tensors_[i].slab);
    tensors_[i] = {.slab = std::nullopt, .chunks_left = options_.chunks[i]};
  }
  std::fill(summed_.begin(), summed_.end(), 0);
  looks_.clear();
  waiting_.clear();
  complete_ = 0;
  any_summed_ = false;
}

void Reduction::BeginMicro(uint32_t rank, bool last) {
  Rank& r = ranks_[rank];
  if (last) r.last = static_cast<uint32_t>(r.micros.size());
  r.micros.push_back(
      {.crc = std::vector<std::optional<uint32_t>>(summed_.size()), .count = std::vector<uint64_t>(tensors_.size())});
}

Reduction::Arrival Reduction::Deliver(uint32_t rank, ChunkId id, uint32_t crc) {
  Micro& micro = ranks_[rank].micros[id.micro];
  std::optional<uint32_t>& known = micro.crc[Flat(id.tensor, id.chunk)];
  if (known) return known == crc ? Arrival::kAgain : Arrival::kOther;
  known = crc;
  ++micro.count[id.tensor];
  looks_.push_back({id.tensor, id.chunk});
  return Arrival::kNew;
}

void Reduction::EndMicro(uint32_t rank, std::vector<bool> absent) {
  Micro& micro = ranks_[rank].micros.back();
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!absent[i]) continue;
    for (uint64_t c = 0; c < options_.chunks[i]; ++c) looks_.push_back({i, c});
  }
  micro.absent = std::move(absent);
  micro.ended = true;
}

bool Reduction::Forget(uint32_t rank) {
  // A sum has a part of every rank in it, or what the rank said of having none.
  if (any_summed_) return false;
  ranks_[rank] = {};
  return true;
}

void Reduction::Release(uint32_t tensor, Slab slab) {
  PoolOf(tensor).Free(slab);
  looks_.insert(looks_.end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
}

bool Reduction::Settled(uint32_t rank, ChunkId id) const {
  const Rank& r = ranks_[rank];
  if (r.micros.size() <= id.micro) return false;
  const Micro& micro = r.micros[id.micro];
  return micro.crc[Flat(id.tensor, id.chunk)].has_value() || (micro.ended && micro.absent[id.tensor]);
}

bool Reduction::Ready(ChunkId id) const {
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (!Settled(rank, id)) return false;
  }
  return true;
}

Reduction::Progress Reduction::Advance() {
  Progress progress;
  // In order, so that the same state gives the same sums.
  std::sort(looks_.begin(), looks_.end());
  looks_.erase(std::unique(looks_.begin(), looks_.end()), looks_.end());
  for (const Spot& spot : std::exchange(looks_, {})) {
    if (!AdvanceChunk(spot.tensor, spot.chunk, &progress)) waiting_.push_back(spot);
  }
  return progress;
}

bool Reduction::AdvanceChunk(uint32_t tensor, uint64_t chunk, Progress* progress) {
  Tensor& t = tensors_[tensor];
  uint32_t& summed = summed_[Flat(tensor, chunk)];
  while (!t.complete && Ready({summed, tensor, chunk})) {
    Sum sum{.id = {summed, tensor, chunk}};
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (ranks_[rank].micros[summed].crc[Flat(tensor, chunk)]) sum.ranks.push_back(rank);
    }
    if (!sum.ranks.empty()) {
      if (!t.slab) t.slab = PoolOf(tensor).Allocate(options_.slab_bytes[tensor]);
      if (!t.slab) return false;
      sum.slab = *t.slab;
      sum.first = !Started(tensor, chunk);
      progress->sums.push_back(std::move(sum));
    }
    any_summed_ = true;
    if (ranks_[0].last != summed++) continue;
    if (--t.chunks_left > 0) return true;
    t.complete = true;
    ++complete_;
    progress->complete.push_back({tensor, std::exchange(t.slab, std::nullopt)});
  }
  return true;
}

// Of an earlier micro-batch.
bool Reduction::Started(uint32_t tensor, uint64_t chunk) const {
  const uint32_t summed = summed_[Flat(tensor, chunk)];
  for (const Rank& rank : ranks_) {
    for (uint32_t m = 0; m < summed; ++m) {
      if (rank.micros[m].crc[Flat(tensor, chunk)]) return true;
    }
  }
  return false;
}

std::optional<ChunkId> Reduction::Wanted(uint32_t rank) const {
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].slab) continue;
    if (auto id = WantedOf(rank, i, /*by_another=*/false)) return id;
  }
  std::optional<ChunkId> lowest;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].slab || tensors_[i].complete) continue;
    if (!pools_[options_.pool_of[i]].Fits(options_.slab_bytes[i])) continue;
    const auto id = WantedOf(rank, i, /*by_another=*/true);
    if (id && (!lowest || *id < *lowest)) lowest = id;
  }
  return lowest;
}

std::optional<ChunkId> Reduction::WantedOf(uint32_t rank, uint32_t tensor, bool by_another) const {
  for (uint64_t c = 0; c < options_.chunks[tensor]; ++c) {
    const ChunkId id{summed_[Flat(tensor, c)], tensor, c};
    if (ranks_[rank].micros.size() <= id.micro || Settled(rank, id)) continue;
    if (!by_another || DeliveredByAny(id)) return id;
  }
  return std::nullopt;
}

bool Reduction::DeliveredByAny(ChunkId id) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    return rank.micros.size() > id.micro && rank.micros[id.micro].crc[Flat(id.tensor, id.chunk)];
  });
}

uint64_t Reduction::count(uint32_t rank, uint32_t micro, uint32_t tensor) const {
  return ranks_[rank].micros[micro].count[tensor];
}

std::vector<bool> Reduction::Delivered(uint32_t rank, uint32_t micro, uint32_t tensor) const {
  std::vector<bool> delivered;
  for (uint64_t c = 0; c < options_.chunks[tensor]; ++c) {
    delivered.push_back(ranks_[rank].micros[micro].crc[Flat(tensor, c)].has_value());
  }
  return delivered;
}

}  // namespace ballast
