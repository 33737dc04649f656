// The run that a seed stands for: one as the simulator of a single daemon draws it, placed on several.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "tests/server/step/parts_simulator_run.h"

namespace ballast::sim {
namespace {

constexpr uint64_t kMostParts = 4, kMostRanks = 8;

PartPlacement Place(const RunShape& whole, uint32_t parts) {
  v1::RunSpec spec;
  for (uint32_t i = 0; i < whole.machine.tensor_names.size(); ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(whole.machine.tensor_names[i]);
    const uint64_t last = whole.machine.reduction.chunks[i] - 1;
    tensor->add_shape(static_cast<int64_t>(last * kChunkBytes + whole.last_chunk_bytes[i]));
  }
  return *PartPlacement::Of(spec, parts);
}

// Its pools have room for what they must, as those of the whole run do.
RunShape PartOf(const RunShape& whole, const std::vector<uint32_t>& numbers) {
  RunShape part = whole;
  part.machine.tensor_names.clear();
  part.last_chunk_bytes.clear();
  const ReductionTracker::Options& from = whole.machine.reduction;
  ReductionTracker::Options& to = part.machine.reduction = {.micros = from.micros};
  to.pool_bytes.resize(from.pool_bytes.size());
  std::vector<uint64_t> all(from.pool_bytes.size());
  for (const uint32_t i : numbers) {
    part.machine.tensor_names.push_back(whole.machine.tensor_names[i]);
    part.last_chunk_bytes.push_back(whole.last_chunk_bytes[i]);
    to.chunks.push_back(from.chunks[i]);
    to.slab_bytes.push_back(from.slab_bytes[i]);
    to.pool_of.push_back(from.pool_of[i]);
    all[from.pool_of[i]] += from.slab_bytes[i];
  }
  for (size_t p = 0; p < all.size(); ++p) to.pool_bytes[p] = std::min(all[p], from.pool_bytes[p]);
  return part;
}

}  // namespace

DrawnRun DrawPartsRun(uint64_t seed, Random* random) {
  DrawnRun run;
  run.whole = DrawRun({.seed = seed}, random, &run.world);
  run.world = static_cast<uint32_t>(1 + Below(random, kMostRanks));
  if (!Chance(random, 4)) run.whole.machine.commit = Commit::kStaged;
  const uint64_t tensors = run.whole.machine.tensor_names.size();
  const auto parts =
      static_cast<uint32_t>(std::min(tensors, Chance(random, 10) ? 1 : 2 + Below(random, kMostParts - 1)));
  run.whole.machine.is_part = parts > 1;
  run.whole.machine.leaves_out_lost = false;
  if (run.whole.machine.commit == Commit::kStaged) {  // all sums at once
    std::vector<uint64_t>& bytes = run.whole.machine.reduction.pool_bytes;
    std::fill(bytes.begin(), bytes.end(), 0);
    for (uint32_t i = 0; i < tensors; ++i) {
      bytes[run.whole.machine.reduction.pool_of[i]] += run.whole.machine.reduction.slab_bytes[i];
    }
  }
  run.placement = Place(run.whole, parts);
  for (uint32_t part = 0; part < parts; ++part) run.parts.push_back(PartOf(run.whole, run.placement.numbers(part)));
  run.storage = {.journal = Chance(random, 2),
                 .checkpoint_every = 1 + Below(random, 3),
                 .snapshot_every = 1 + Below(random, 2),
                 .checkpoints = 2 + Below(random, 2),
                 .snapshots = 2 + Below(random, 3)};
  run.rewinds_torn = Chance(random, 3);
  return run;
}

}  // namespace ballast::sim
