#include "server/plan.h"

#include <algorithm>

namespace ballast {
namespace {

// Bytes the plane would take without padding and alignment.
uint64_t NeededPlaneBytes(const kernels::Plane& plane, uint64_t elements) {
  return (elements + plane.per - 1) / plane.per * plane.bytes;
}

uint64_t& OfKind(PlanBytes& bytes, kernels::Kind kind) {
  uint64_t* const by_kind[] = {&bytes.weights, &bytes.momentum, &bytes.variance};
  return *by_kind[static_cast<size_t>(kind)];
}

}  // namespace

Plan MakePlan(const RunSpec& spec) {
  Plan plan{.tensors = spec.tensors.size()};
  uint64_t all_slabs = 0, largest_slab = 0, largest_tensor = 0;
  for (const TensorSpec& t : spec.tensors) {
    for (const kernels::Plane& plane : spec.groups[t.group].kernel->planes) {
      const uint64_t aligned = AlignedPlaneBytes(plane, t.elements);
      OfKind(plan.bytes, plane.kind) += aligned;
      plan.bytes.padding += aligned - NeededPlaneBytes(plane, t.elements);
    }
    plan.parameters += t.elements;
    plan.push_bytes += GradientBytes(t);
    plan.pull_bytes += ServingBytes(t);
    all_slabs += SlabBytes(t);
    largest_slab = std::max(largest_slab, SlabBytes(t));
    largest_tensor = std::max(largest_tensor, t.elements);
    const uint64_t chunk = std::min(t.elements, spec.chunk_elements) * WireBytes(t.serving_format);
    plan.send_slot_bytes = std::max(plan.send_slot_bytes, AlignUp(chunk));
  }
  plan.trainer_weight_bytes = plan.push_bytes;  // gradients travel in the dtype of the parameters
  plan.bytes.gradients = std::min(all_slabs, std::max(2 * largest_slab, AlignUp(spec.credit_bytes)));
  plan.statistics_tiles = (largest_tensor + kernels::kTile - 1) / kernels::kTile;
  plan.bytes.staging = kSlots * plan.send_slot_bytes + AlignUp(plan.statistics_tiles * sizeof(kernels::TileStatistics));
  return plan;
}

}  // namespace ballast
