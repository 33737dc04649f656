// The checker's account of payloads, sums and slabs.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "tests/server/step/step_simulator_checker.h"

namespace ballast::sim {

void StepChecker::On(const effect::Hold& e) {
  Rank& rank = ranks_[e.rank];
  if (chunk_ == nullptr || rank.session != chunk_->session || !rank.in_step ||
      e.id != ChunkId{chunk_->micro, chunk_->tensor, chunk_->chunk}) {
    return Fail("held another chunk than the one that came");
  }
  ++chunk_answers_;
  if (discarded_) return Fail("held a chunk of a step that is discarded");
  if (known_payload_) Fail("a chunk counts twice");
  rank.micros[e.id.micro].delivered[{e.id.tensor, e.id.chunk}] = chunk_->crc;
  rank.held[e.id] = chunk_->crc;
  rank.held_bytes += shape_.ChunkBytes(e.id);
  if (rank.held_bytes > shape_.window_bytes + 2 * kChunkBytes) {
    Fail(absl::StrCat("rank ", e.rank, ": ", rank.held_bytes, " bytes are held, its window is ", shape_.window_bytes));
  }
  waited_for_slab_ = AllSettled(e.id);
}

void StepChecker::On(const effect::Drop& e) {
  ++chunk_answers_;
  if (chunk_ == nullptr || ranks_[e.rank].session != chunk_->session) return Fail("dropped a chunk that did not come");
  if (e.again != known_payload_.has_value()) Fail("a chunk came again or did not, and was taken for the contrary");
  // The checksums of a rank's earlier micro-batches, which are wholly summed, are no longer kept.
  const bool kept = chunk_->micro + ReductionTracker::kMostLive >= ranks_[e.rank].micros.size();
  if (kept && known_payload_ && *known_payload_ != chunk_->crc)
    Fail("other bytes were acknowledged for a chunk that is in");
  if (!e.again && ranks_[e.rank].in_step && !discarded_) Fail("dropped a chunk of the open step");
}

bool StepChecker::Settled(uint32_t rank, ChunkId id) const {
  if (ranks_[rank].micros.size() <= id.micro) return false;
  if (!shape_.Covers(rank, static_cast<uint32_t>(ranks_.size()), id.tensor, id.chunk)) return true;
  const Micro& micro = ranks_[rank].micros[id.micro];
  return (micro.ended && micro.absent[id.tensor]) || micro.delivered.count({id.tensor, id.chunk}) > 0;
}

bool StepChecker::AllSettled(ChunkId id) const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].left_out && !Settled(rank, id)) return false;
  }
  return true;
}

void StepChecker::On(const effect::Sum& e) {
  waited_for_slab_ = false;
  if (!open_ || discarded_ || tensors_[e.id.tensor].updated) return Fail("a sum of what is not open");
  if (!AllSettled(e.id)) return Fail("a sum before every rank had delivered the chunk or listed it absent");
  std::vector<Term>& sum = tensors_[e.id.tensor].sums[e.id.chunk];
  if (e.first != sum.empty()) Fail("`first` is not on the first sum of a chunk");
  decltype(e.ranks) ranks;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].left_out) continue;
    if (ranks_[r].micros[e.id.micro].delivered.count({e.id.tensor, e.id.chunk}) > 0) ranks.push_back(r);
  }
  const bool zeroed = ranks.empty() && e.first && Canonical(e.id.tensor, e.id.chunk) == std::vector<Term>();
  if (e.ranks != ranks || (ranks.empty() && !zeroed))
    return Fail("a sum is not over the ranks that delivered, in rank order");
  if (!sum.empty() && sum.back().micro >= e.id.micro) return Fail("a micro-batch was summed again, or out of order");
  if (zeroed) tensors_[e.id.tensor].zeroed.insert(e.id.chunk);
  for (const uint32_t r : ranks) {
    const auto held = ranks_[r].held.find(e.id);
    if (held == ranks_[r].held.end()) return Fail("a sum of a payload that is not held");
    sum.push_back({e.id.micro, r, held->second});
    ranks_[r].held_bytes -= shape_.ChunkBytes(e.id);
    ranks_[r].held.erase(held);
  }
  CheckSlab(e);
}

void StepChecker::CheckPieces() {
  const auto world = static_cast<uint32_t>(ranks_.size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    for (uint64_t c = 0; c < shape_.machine.reduction.chunks[i]; ++c) {
      std::vector<bool> has(RunShape::kPieces);
      for (uint32_t r = 0; r < world; ++r) {
        const ChunkPart part = shape_.PartOf(r, world, i, c);
        for (uint32_t p = part.begin; p < part.end && !ranks_[r].left_out; ++p) has[p] = true;
      }
      if (std::count(has.begin(), has.end(), true) == RunShape::kPieces) continue;
      return Fail(
          absl::StrCat("without the ranks that are left out nobody contributes to all of chunk ", c, " of tensor ", i));
    }
  }
}

void StepChecker::CheckSlab(const effect::Sum& e) {
  const ReductionTracker::Options& reduction = shape_.machine.reduction;
  const uint32_t pool = reduction.pool_of[e.id.tensor];
  if (const LiveSlab* live = Live(step_, e.id.tensor)) {
    if (live->slab.offset != e.slab.offset) Fail("a tensor moved to another slab");
    return;
  }
  const uint64_t end = e.slab.offset + e.slab.bytes;
  if (e.slab.bytes != reduction.slab_bytes[e.id.tensor] || end > reduction.pool_bytes[pool]) Fail("a wrong slab");
  for (const LiveSlab& other : slabs_) {
    if (reduction.pool_of[other.tensor] != pool) continue;
    if (e.slab.offset < other.slab.offset + other.slab.bytes && other.slab.offset < end) Fail("two slabs overlap");
  }
  slabs_.push_back({step_, e.id.tensor, e.slab, /*updating=*/false});
}

void StepChecker::On(const effect::Forget& e) {
  for (const Tensor& tensor : tensors_) {
    for (const auto& sum : tensor.sums) {
      if (std::any_of(sum.begin(), sum.end(), [&](const Term& t) { return t.rank == e.rank; })) {
        Fail("forgot what is in a sum");
      }
    }
  }
  Rank& rank = ranks_[e.rank];
  rank = {.session = rank.session,
          .connected = rank.connected,
          .came = rank.came,
          .lacking = std::move(rank.lacking),
          .told = std::move(rank.told)};
}

std::optional<double> StepChecker::MeasureOf(uint32_t tensor) const {
  if (AbsentEverywhere(tensor)) return std::nullopt;
  uint64_t terms = step_;
  for (const std::vector<Term>& sum : tensors_[tensor].sums) {
    for (const Term& term : sum) terms = Mix(terms, term.payload);
  }
  return static_cast<double>(terms % 1000003) / 7;
}

}  // namespace ballast::sim
