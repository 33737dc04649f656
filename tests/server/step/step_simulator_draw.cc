#include <algorithm>

#include "absl/strings/str_cat.h"

#include "tests/server/step/chunk_sets.h"
#include "tests/server/step/step_simulator.h"

namespace ballast::sim {

// One rank has the chunk; or it has the chunk's first pieces, and the next rank the others. The rest draw some, or
// none.
ChunkPart RunShape::PartOf(uint32_t rank, uint32_t world, uint32_t tensor, uint64_t chunk) const {
  if (coverage_seed == 0) return {0, kPieces, kPieces};
  const auto draw = [&](uint64_t who) { return Mix(Mix(coverage_seed * 100 + who, tensor), chunk); };
  const auto owner = static_cast<uint32_t>(draw(99) % world), next = (owner + 1) % world;
  const bool cut = world > 1 && draw(98) % 2 == 0;
  const auto at = cut ? static_cast<uint32_t>(1 + draw(97) % (kPieces - 1)) : kPieces;
  if (rank == owner) return {0, at, kPieces};
  if (rank == next && cut) return {at, kPieces, kPieces};
  const auto begin = static_cast<uint32_t>(draw(rank) % 3 == 0 ? 0 : draw(rank) % kPieces);
  const auto size = static_cast<uint32_t>(1 + Mix(draw(rank), 1) % (kPieces - begin));
  return {begin, draw(rank) % 4 == 0 ? begin : begin + size, kPieces};
}

ChunkSet RunShape::CoverageOf(uint32_t rank, uint32_t world) const {
  std::vector<std::vector<bool>> set;
  std::vector<std::vector<ChunkSet::Piece>> parts;
  for (uint32_t i = 0; coverage_seed != 0 && i < machine.reduction.chunks.size(); ++i) {
    std::vector<bool>& chunks = set.emplace_back();
    parts.emplace_back();
    for (uint64_t c = 0; c < machine.reduction.chunks[i]; ++c) {
      const ChunkPart part = PartOf(rank, world, i, c);
      const uint32_t size = part.end - part.begin;
      chunks.push_back(size > 0);
      if (size > 0 && size < kPieces) parts.back().push_back({c, part});
    }
  }
  return testing::ChunkSetOf(set, parts);
}

// A run that updates before its micro-batches are all in, or judges first, has all its sums at once: only a step of one
// micro-batch in `release` does with a pool that is smaller than the gradient.
RunShape DrawRun(const SimulatorOptions& options, Random* random, uint32_t* world) {
  RunShape run;
  const bool wide = Chance(random, 25);
  *world = wide ? 64 : static_cast<uint32_t>(1 + Below(random, 6));
  run.machine.commit = Chance(random, 2) ? Commit::kStaged : Commit::kRelease;
  run.machine.most_micros = static_cast<uint32_t>(Chance(random, 2) ? 1 : 1 + Below(random, wide ? 2 : 4));
  if (options.least) run.machine.commit = Commit::kRelease, run.machine.most_micros = 1;
  run.machine.lease_s = 2;
  run.machine.rank_timeout_s = 10;
  if (Chance(random, 4)) run.machine.step_timeout_s = static_cast<double>(4 + Below(random, 20));
  run.machine.leaves_out_lost = Chance(random, 2);
  ReductionTracker::Options& reduction = run.machine.reduction;
  const uint64_t tensors = 1 + Below(random, wide ? 2 : 8), pools = 1 + Below(random, 3);
  reduction.pool_bytes.resize(pools);
  std::vector<uint64_t> all(pools), largest(pools);
  uint64_t gradient = 0, largest_tensor = 0;
  for (uint32_t i = 0; i < tensors; ++i) {
    run.machine.tensor_names.push_back(absl::StrCat("w", i));
    reduction.chunks.push_back(1 + Below(random, wide ? 2 : Chance(random, 3) ? 12 : 4));
    run.last_chunk_bytes.push_back(1 + Below(random, kChunkBytes));
    const uint64_t bytes = (reduction.chunks[i] - 1) * kChunkBytes + run.last_chunk_bytes[i];
    reduction.slab_bytes.push_back((bytes + 63) / 64 * 64);
    reduction.pool_of.push_back(static_cast<uint32_t>(Below(random, pools)));
    all[reduction.pool_of[i]] += reduction.slab_bytes[i];
    largest[reduction.pool_of[i]] = std::max(largest[reduction.pool_of[i]], reduction.slab_bytes[i]);
    gradient += bytes;
    largest_tensor = std::max(largest_tensor, bytes);
  }
  if (Chance(random, 3) || options.sharded) run.coverage_seed = 1 + Below(random, 1000);
  const bool whole = run.machine.commit == Commit::kStaged || run.machine.most_micros > 1;
  for (uint64_t p = 0; p < pools; ++p) {
    reduction.pool_bytes[p] = whole ? all[p] : largest[p] + Below(random, 3) * (all[p] - largest[p]) / 2;
  }
  const uint64_t windows[] = {largest_tensor / 10, largest_tensor, Below(random, gradient), gradient};
  run.window_bytes = std::max(kChunkBytes, windows[Below(random, 4)]);
  if (!options.least) return run;
  reduction.pool_bytes = largest;
  run.window_bytes = kChunkBytes;
  return run;
}

}  // namespace ballast::sim
