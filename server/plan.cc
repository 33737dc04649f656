#include "server/plan.h"

#include <algorithm>

namespace ballast {
namespace {

// Bytes the plane would take without padding and alignment.
uint64_t NeededPlaneBytes(const kernels::Plane& plane, uint64_t elements) {
  return (elements + plane.per - 1) / plane.per * plane.bytes;
}

// Counts what goes out of a tensor's chunks.
void AddServing(const RunSpec& spec, const TensorSpec& t, Plan* plan) {
  plan->pull_bytes += ServingBytes(t);
  const uint64_t chunk_bytes = std::min(t.elements, spec.chunk_elements) * WireBytes(t.serving_format);
  plan->send_slot_bytes = std::max(plan->send_slot_bytes, AlignUp(chunk_bytes));
  if (t.row_length == 0) return;
  plan->scales += ScaleCount(t);
  for (uint64_t k = 0; k < ChunkCount(spec, t); ++k) {
    const uint64_t scales = ScalesOf(t, ChunkBegin(spec, k), ChunkEnd(spec, t, k)).size();
    plan->pull_bytes += scales * sizeof(float);
    plan->send_slot_scales = std::max(plan->send_slot_scales, scales);
  }
}

uint64_t& OfKind(PlanBytes& bytes, kernels::Kind kind) {
  uint64_t* const by_kind[] = {&bytes.weights, &bytes.momentum, &bytes.variance};
  return *by_kind[static_cast<size_t>(kind)];
}

}  // namespace

Plan MakePlan(const RunSpec& spec) {
  Plan plan{.tensors = spec.tensors.size()};
  uint64_t all_slabs = 0, largest_slab = 0, largest_tensor = 0;
  for (const GroupSpec& group : spec.groups) plan.groups.push_back({.kernel = group.kernel});
  for (const TensorSpec& t : spec.tensors) {
    plan.groups[t.group].parameters += t.elements;
    for (const kernels::Plane& plane : spec.groups[t.group].kernel->planes) {
      const uint64_t aligned = AlignedPlaneBytes(plane, t.elements);
      OfKind(plan.bytes, plane.kind) += aligned;
      plan.bytes.padding += aligned - NeededPlaneBytes(plane, t.elements);
    }
    plan.parameters += t.elements;
    plan.push_bytes += GradientBytes(t);
    plan.trainer_weight_bytes += t.elements * WireBytes(t.dtype);
    AddServing(spec, t, &plan);
    all_slabs += SlabBytes(t);
    largest_slab = std::max(largest_slab, SlabBytes(t));
    largest_tensor = std::max(largest_tensor, t.elements);
  }
  plan.bytes.gradients = std::min(all_slabs, std::max(2 * largest_slab, AlignUp(spec.credit_bytes)));
  plan.statistics_tiles = (largest_tensor + kernels::kTile - 1) / kernels::kTile;
  plan.bytes.staging = kSlots * (plan.send_slot_bytes + plan.send_slot_scales * sizeof(float)) +
                       AlignUp(plan.scales * sizeof(float)) +
                       AlignUp(plan.statistics_tiles * sizeof(kernels::TileStatistics));
  return plan;
}

}  // namespace ballast
