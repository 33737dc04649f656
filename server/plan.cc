#include "server/plan.h"

#include <algorithm>
#include <utility>

namespace ballast {
namespace {

constexpr uint64_t PlanBytes::*kFields[] = {&PlanBytes::weights,   &PlanBytes::momentum, &PlanBytes::variance,
                                            &PlanBytes::gradients, &PlanBytes::staging,  &PlanBytes::padding,
                                            &PlanBytes::snapshots};

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

// A shard while its tensors are added.
struct Shard {
  ShardPlan plan;
  uint64_t all_slabs = 0, largest_slab = 0, largest_tensor = 0;
};

void AddTensor(const RunSpec& spec, const TensorSpec& t, Shard* shard) {
  PlanBytes& bytes = shard->plan.bytes;
  for (const kernels::Plane& plane : spec.groups[t.group].kernel->planes) {
    const uint64_t aligned = AlignedPlaneBytes(plane, t.elements);
    OfKind(bytes, plane.kind) += aligned;
    bytes.padding += aligned - NeededPlaneBytes(plane, t.elements);
  }
  shard->plan.scales += ScaleCount(t);
  shard->plan.kept_bytes += KeptBytes(spec, t);
  shard->all_slabs += SlabBytes(spec, t);
  shard->largest_slab = std::max(shard->largest_slab, SlabBytes(spec, t));
  shard->largest_tensor = std::max(shard->largest_tensor, t.elements);
}

ShardPlan Completed(const RunSpec& spec, Shard shard) {
  ShardPlan& plan = shard.plan;
  // Several micro-batches keep every sum until the last of them; staged, every gradient until the verdict.
  plan.pool_bytes = spec.accumulation > 1 || spec.staged
                        ? shard.all_slabs
                        : std::min(shard.all_slabs, std::max(2 * shard.largest_slab, AlignUp(spec.credit_bytes)));
  plan.bytes.gradients = plan.pool_bytes;
  plan.bytes.snapshots = spec.snapshots * plan.bytes.stored();
  plan.statistics_tiles = (shard.largest_tensor + kernels::kTile - 1) / kernels::kTile;
  plan.bytes.staging = AlignUp(plan.scales * sizeof(float)) +
                       AlignUp(plan.statistics_tiles * sizeof(kernels::TileStatistics)) + plan.kept_bytes;
  return plan;
}

// No more can wait than is sent.
uint64_t WindowBytes(const RunSpec& spec, uint64_t push_bytes) {
  const uint64_t chunk_bytes = spec.chunk_elements * sizeof(float);
  return std::min(spec.accumulation * push_bytes,
                  std::max(spec.credit_bytes, chunk_bytes) + kChunksBeyondCredit * chunk_bytes);
}

}  // namespace

PlanBytes& PlanBytes::operator+=(const PlanBytes& other) {
  for (const auto field : kFields) this->*field += other.*field;
  return *this;
}

PlanBytes& PlanBytes::operator-=(const PlanBytes& other) {
  for (const auto field : kFields) this->*field -= other.*field;
  return *this;
}

Plan MakePlan(const RunSpec& spec, Placement placement) {
  Plan plan{.tensors = spec.tensors.size(), .chunk_elements = spec.chunk_elements, .placement = std::move(placement)};
  std::vector<Shard> shards(plan.placement.devices.size());
  for (const GroupSpec& group : spec.groups) plan.groups.push_back({.kernel = group.kernel});
  for (size_t i = 0; i < spec.tensors.size(); ++i) {
    const TensorSpec& t = spec.tensors[i];
    AddTensor(spec, t, &shards[plan.placement.shard_of[i]]);
    AddServing(spec, t, &plan);
    plan.groups[t.group].parameters += t.elements;
    plan.parameters += t.elements;
    plan.push_bytes += GradientBytes(t);
    plan.trainer_weight_bytes += t.elements * WireBytes(t.dtype);
  }
  for (Shard& shard : shards) plan.shards.push_back(Completed(spec, std::move(shard)));
  plan.window_bytes = WindowBytes(spec, plan.push_bytes);
  plan.shards[0].bytes.gradients += spec.ranks * plan.window_bytes;
  plan.shards[0].bytes.staging += SlotCount(spec) * (plan.send_slot_bytes + plan.send_slot_scales * sizeof(float));
  for (const ShardPlan& shard : plan.shards) plan.bytes += shard.bytes;
  return plan;
}

}  // namespace ballast
