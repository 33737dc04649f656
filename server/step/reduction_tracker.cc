#include "server/step/reduction_tracker.h"

#include <algorithm>
#include <utility>

namespace ballast {
namespace {

uint64_t BitBytes(uint64_t bits) { return (bits + 63) / 64 * 8; }

}  // namespace

ReductionTracker::ReductionTracker(Options options)
    : options_(std::move(options)),
      live_(std::clamp<uint32_t>(options_.micros, 1, kMostLive)),
      tensors_(options_.chunks.size()) {
  size_t chunks = 0;
  for (const uint64_t of_tensor : options_.chunks) {
    first_chunk_.push_back(chunks);
    chunks += of_tensor;
  }
  summed_.resize(chunks);
  started_.resize(chunks);
  tallies_.assign(live_, {std::vector<uint16_t>(chunks), std::vector<bool>(chunks)});
  turns_.assign(live_ + 1, {IndexSet(chunks), IndexSet(chunks), IndexSet(chunks)});
  small_ready_ = looks_ = looking_ = waiting_ = IndexSet(chunks);
  for (const uint64_t bytes : options_.pool_bytes) pools_.emplace_back(bytes, tensors_.size());
  std::vector<uint64_t> ends(pools_.size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    uint64_t& end = ends[options_.pool_of[i]];
    places_.push_back({.offset = end, .bytes = options_.slab_bytes[i]});
    end += options_.slab_bytes[i];
  }
  for (size_t p = 0; p < pools_.size(); ++p) {
    whole_.push_back(ends[p] <= options_.pool_bytes[p]);
    fits_.emplace_back(whole_[p] ? 0 : tensors_.size());
  }
  waits_ = fits_;
  freed_.resize(pools_.size());
  looked_.resize(pools_.size());
  taken_.resize(tensors_.size());
}

uint64_t ReductionTracker::BytesAtMost(const Size& size) {
  const uint64_t live = std::clamp<uint64_t>(size.micros, 1, kMostLive);
  const uint64_t of_micro =
      sizeof(Micro) + size.chunks * sizeof(uint32_t) + BitBytes(size.chunks) + BitBytes(size.tensors);
  const uint64_t of_rank = sizeof(Rank) + sizeof(ChunkSet) + ChunkSet::Bytes(size.chunks, size.parts) + live * of_micro;
  const uint64_t tally = sizeof(Tally) + size.chunks * sizeof(uint16_t) + BitBytes(size.chunks);
  const uint64_t turn = sizeof(Turn) + 3 * IndexSet::Bytes(size.chunks);
  const uint64_t of_chunks = size.chunks * sizeof(uint32_t) + BitBytes(size.chunks) + 4 * IndexSet::Bytes(size.chunks);
  const uint64_t of_tensors =
      size.tensors * (sizeof(Tensor) + sizeof(Slab) + sizeof(size_t) + 3 * sizeof(uint64_t)) + BitBytes(size.tensors);
  const uint64_t of_pool = sizeof(SlabAllocator) + (size.tensors + 2) * sizeof(Slab) +
                           2 * (sizeof(FirstFit) + FirstFit::Bytes(size.tensors) + 1);
  return size.ranks * of_rank + live * tally + (live + 1) * turn + of_chunks + of_tensors + size.pools * of_pool;
}

uint32_t ReductionTracker::TensorOf(size_t flat) const {
  const auto after = std::upper_bound(first_chunk_.begin(), first_chunk_.end(), flat);
  return static_cast<uint32_t>(after - first_chunk_.begin()) - 1;
}

bool ReductionTracker::Allocate(uint32_t tensor) {
  const uint32_t pool = options_.pool_of[tensor];
  std::optional<Slab>& slab = tensors_[tensor].slab;
  if (!whole_[pool]) {
    slab = pools_[pool].Allocate(options_.slab_bytes[tensor]);
  } else if (!taken_[tensor]) {  // else the last step's update reads it
    taken_[tensor] = true;
    slab = places_[tensor];
  }
  if (slab) Refile(tensor);
  return slab.has_value();
}

void ReductionTracker::Free(uint32_t tensor, Slab slab) {
  const uint32_t pool = options_.pool_of[tensor];
  if (whole_[pool]) {
    taken_[tensor] = false;
  } else {
    pools_[pool].Free(slab);
  }
}

void ReductionTracker::Begin(const std::vector<bool>& left_out) {
  ranks_.resize(left_out.size());
  for (size_t r = 0; r < ranks_.size(); ++r) {
    ranks_[r].begun = 0;
    ranks_[r].left_out = left_out[r];
    ranks_[r].last.reset();
  }
  taking_part_ = static_cast<uint32_t>(std::count(left_out.begin(), left_out.end(), false));
  if (covers_.size() != ranks_.size()) covers_.assign(ranks_.size(), {});
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].slab) Free(i, *tensors_[i].slab);
    tensors_[i] = {.slab = std::nullopt, .chunks_left = options_.chunks[i]};
  }
  std::fill(summed_.begin(), summed_.end(), 0);
  std::fill(started_.begin(), started_.end(), false);
  looks_.Clear();
  waiting_.Clear();
  for (FirstFit& wait : waits_) wait.Clear();
  wanted_.reset();
  oldest_ = 0;
  complete_ = 0;
  any_summed_ = last_named_ = false;
  ClearTallies();
  CountBegun();
}

void ReductionTracker::ClearTallies() {
  for (Tally& tally : tallies_) {
    std::fill(tally.settled.begin(), tally.settled.end(), 0);
    std::fill(tally.delivered.begin(), tally.delivered.end(), false);
    tally.left = summed_.size();
  }
  for (Turn& turn : turns_) {
    for (IndexSet* set : {&turn.placed, &turn.placed_ready, &turn.unplaced_ready}) set->Clear();
  }
  small_ready_.Clear();
  for (FirstFit& fit : fits_) fit.Clear();
}

void ReductionTracker::CountAgain() {
  ClearTallies();
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    for (uint32_t micro = 0; micro < ranks_[rank].begun; ++micro) {
      for (uint32_t i = 0; i < tensors_.size(); ++i) {
        for (uint64_t c = 0; c < options_.chunks[i]; ++c) {
          const size_t flat = Flat(i, c);
          if (Settled(rank, {micro, i, c})) ++TallyOf(micro).settled[flat];
          if (At(rank, micro).delivered[flat]) TallyOf(micro).delivered[flat] = true;
        }
      }
    }
  }
  for (uint32_t i = 0; i < tensors_.size(); ++i) Refile(i);
  work_ += summed_.size() * ranks() * live_;
}

void ReductionTracker::CountBegun() {
  begun_by_all_ = UINT32_MAX;
  for (const Rank& rank : ranks_) begun_by_all_ = rank.left_out ? begun_by_all_ : std::min(begun_by_all_, rank.begun);
  work_ += ranks();
}

void ReductionTracker::BeginMicro(uint32_t rank, bool last) {
  Rank& r = ranks_[rank];
  const uint32_t micro = r.begun++;
  if (last) r.last = micro;
  r.live.resize(live_);
  Micro& m = At(rank, micro);
  m.ended = false;
  m.left = summed_.size();
  m.absent.clear();
  m.crc.resize(summed_.size());
  m.delivered.assign(summed_.size(), false);
  CountBegun();
  if (covers_[rank].empty()) return;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    for (uint64_t c = 0; c < options_.chunks[i]; ++c) {
      if (Contains(covers_[rank], i, c)) continue;
      --m.left;
      Settle(micro, Flat(i, c));
    }
  }
}

void ReductionTracker::NameLast(uint32_t rank) {
  const bool known = Last().has_value();
  ranks_[rank].last = ranks_[rank].begun - 1;
  last_named_ |= !known && Last().has_value();
}

ReductionTracker::Arrival ReductionTracker::Deliver(uint32_t rank, ChunkId id, uint32_t crc) {
  if (!kept(rank, id.micro)) return Arrival::kAgain;
  Micro& m = At(rank, id.micro);
  const size_t flat = Flat(id.tensor, id.chunk);
  if (m.delivered[flat]) return m.crc[flat] == crc || crc == 0 || m.crc[flat] == 0 ? Arrival::kAgain : Arrival::kOther;
  m.delivered[flat] = true;
  m.crc[flat] = crc;
  --m.left;
  TallyOf(id.micro).delivered[flat] = true;
  if (summed_[flat] == id.micro) File(id.tensor, flat);
  Settle(id.micro, flat);
  return Arrival::kNew;
}

void ReductionTracker::EndMicro(uint32_t rank, std::vector<bool> absent) {
  const uint32_t micro = ranks_[rank].begun - 1;
  Micro& m = At(rank, micro);
  m.absent = std::move(absent);
  m.ended = true;
  if (micro < oldest_) return;  // nothing that it could deliver is absent
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    for (uint64_t c = 0; m.absent[i] && c < options_.chunks[i]; ++c) {
      if (!Contains(covers_[rank], i, c)) continue;
      --m.left;
      Settle(micro, Flat(i, c));
    }
  }
}

void ReductionTracker::Settle(uint32_t micro, size_t flat) {
  ++work_;
  if (++TallyOf(micro).settled[flat] == taking_part_ && summed_[flat] == micro) looks_.Insert(flat);
}

bool ReductionTracker::Forget(uint32_t rank) {
  // A sum has a part of every rank in it, or what the rank said of having none.
  if (any_summed_) return false;
  ranks_[rank].begun = 0;
  ranks_[rank].last.reset();
  last_named_ = false;  // nothing is summed that could be finished
  CountAgain();
  CountBegun();
  return true;
}

void ReductionTracker::LeaveOut(uint32_t rank) {
  ranks_[rank].left_out = true;
  ranks_[rank].begun = 0;
  last_named_ = false;  // as in Forget
  --taking_part_;
  CountAgain();
  CountBegun();
  for (size_t flat = 0; flat < summed_.size(); ++flat) {
    if (TallyOf(0).settled[flat] == taking_part_) looks_.Insert(flat);
  }
}

std::optional<uint32_t> ReductionTracker::Last() const {
  const auto takes_part = [](const Rank& rank) { return !rank.left_out; };
  return std::find_if(ranks_.begin(), ranks_.end(), takes_part)->last;
}

void ReductionTracker::Release(uint32_t tensor, Slab slab) {
  Free(tensor, slab);
  if (!tensors_[tensor].slab) Refile(tensor);
  const uint32_t pool = options_.pool_of[tensor];
  if (whole_[pool]) return Wake(tensor, &looks_);  // nobody else waits for its place
  freed_[pool] = true;
}

void ReductionTracker::Wait(uint32_t tensor, size_t flat) {
  waiting_.Insert(flat);
  const uint32_t pool = options_.pool_of[tensor];
  if (!whole_[pool]) waits_[pool].Set(tensor, options_.slab_bytes[tensor]);
}

void ReductionTracker::Wake(uint32_t tensor, IndexSet* looks) {
  const size_t end = first_chunk_[tensor] + options_.chunks[tensor];
  for (auto i = waiting_.Next(first_chunk_[tensor]); i && *i < end; i = waiting_.Next(*i)) {
    waiting_.Erase(*i);
    looks->Insert(*i);
    ++work_;
  }
  const uint32_t pool = options_.pool_of[tensor];
  if (!whole_[pool]) waits_[pool].Set(tensor, FirstFit::kNone);
}

bool ReductionTracker::Settled(uint32_t rank, ChunkId id) const {
  if (ranks_[rank].begun <= id.micro) return false;
  if (!kept(rank, id.micro) || !Contains(covers_[rank], id.tensor, id.chunk)) return true;
  const Micro& m = At(rank, id.micro);
  return m.delivered[Flat(id.tensor, id.chunk)] || (m.ended && m.absent[id.tensor]);
}

ReductionTracker::Progress ReductionTracker::Advance() {
  Progress progress;
  if (std::exchange(last_named_, false)) FinishSummed(&progress);
  // A tensor that turns out to be absent everywhere may free a slab on the way.
  while (!looks_.empty() || std::find(freed_.begin(), freed_.end(), true) != freed_.end()) {
    // In order, so that the same state gives the same sums.
    std::swap(looks_, looking_);
    std::swap(freed_, looked_);
    uint32_t tensor = 0;
    for (auto i = NextLook(0); i; i = NextLook(tensor + 1)) {
      looking_.Erase(*i);
      tensor = TensorOf(*i);
      if (!AdvanceChunk(tensor, *i - first_chunk_[tensor], &progress)) Wait(tensor, *i);
    }
    looked_.assign(looked_.size(), false);
  }
  return progress;
}

// What waits and finds no slab is not looked at: a slab that comes back would else cost a look at all of them.
std::optional<size_t> ReductionTracker::NextLook(uint32_t from) {
  auto next = looking_.Next(0);
  for (size_t p = 0; p < pools_.size(); ++p) {
    if (!looked_[p]) continue;
    ++work_;
    const auto tensor = waits_[p].First(pools_[p].largest_hole(), from);
    if (!tensor || (next && *next < first_chunk_[*tensor])) continue;
    Wake(static_cast<uint32_t>(*tensor), &looking_);
    next = looking_.Next(0);
  }
  return next;
}

bool ReductionTracker::AdvanceChunk(uint32_t tensor, uint64_t chunk, Progress* progress) {
  Tensor& t = tensors_[tensor];
  const size_t flat = Flat(tensor, chunk);
  const uint32_t& summed = summed_[flat];
  while (!t.complete && MayBegin(summed) && TallyOf(summed).settled[flat] == taking_part_) {
    Sum sum{.id = {summed, tensor, chunk}};
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (!ranks_[rank].left_out && At(rank, summed).delivered[flat]) sum.ranks.push_back(rank);
    }
    work_ += ranks();
    if (!sum.ranks.empty()) {
      if (!t.slab && !Allocate(tensor)) return false;
      sum.slab = *t.slab;
      sum.first = !started_[flat];
      started_[flat] = true;
      t.summed = true;
      progress->sums.push_back(std::move(sum));
    }
    any_summed_ = true;
    const bool last = Last() == summed;
    PassOn(tensor, flat);
    if (!last) continue;
    if (--t.chunks_left > 0) return true;
    Finish(tensor, progress);
  }
  return true;
}

void ReductionTracker::PassOn(uint32_t tensor, size_t flat) {
  Unfile(tensor, flat);
  --TallyOf(summed_[flat]++).left;
  while (TallyOf(oldest_).left == 0) {
    Tally& tally = TallyOf(oldest_++);
    std::fill(tally.settled.begin(), tally.settled.end(), 0);
    std::fill(tally.delivered.begin(), tally.delivered.end(), false);
    tally.left = summed_.size();
  }
  File(tensor, flat);
}

void ReductionTracker::FinishSummed(Progress* progress) {
  work_ += summed_.size();
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    Tensor& t = tensors_[i];
    for (uint64_t c = 0; c < options_.chunks[i]; ++c) t.chunks_left -= summed_[Flat(i, c)] > *Last() ? 1 : 0;
    if (t.chunks_left == 0) Finish(i, progress);
  }
}

void ReductionTracker::Finish(uint32_t tensor, Progress* progress) {
  Tensor& t = tensors_[tensor];
  t.complete = true;
  Refile(tensor);
  ++complete_;
  const auto slab = std::exchange(t.slab, std::nullopt);
  if (slab && !t.summed) Release(tensor, *slab);  // who had a gradient is gone, and its next process has none
  for (uint64_t c = 0; t.summed && c < options_.chunks[tensor]; ++c) {
    if (started_[Flat(tensor, c)]) continue;  // else those that cover it had listed the tensor absent
    progress->sums.push_back({.id = {*Last(), tensor, c}, .slab = *slab, .ranks = {}, .first = true});
  }
  work_ += options_.chunks[tensor];
  progress->complete.push_back({tensor, t.summed ? slab : std::nullopt});
}

uint64_t ReductionTracker::count(uint32_t rank, uint32_t micro, uint32_t tensor) const {
  if (!kept(rank, micro)) return covered(rank, tensor);
  const auto first = At(rank, micro).delivered.begin() + static_cast<std::ptrdiff_t>(first_chunk_[tensor]);
  return static_cast<uint64_t>(std::count(first, first + static_cast<std::ptrdiff_t>(options_.chunks[tensor]), true));
}

uint64_t ReductionTracker::covered(uint32_t rank, uint32_t tensor) const {
  const ChunkSet& covers = covers_[rank];
  return covers.empty() ? options_.chunks[tensor] : covers.Count(tensor);
}

std::vector<bool> ReductionTracker::Delivered(uint32_t rank, uint32_t micro, uint32_t tensor) const {
  std::vector<bool> delivered;
  for (uint64_t c = 0; c < options_.chunks[tensor]; ++c) {
    delivered.push_back(kept(rank, micro) ? At(rank, micro).delivered[Flat(tensor, c)]
                                          : Contains(covers_[rank], tensor, c));
  }
  return delivered;
}

}  // namespace ballast
