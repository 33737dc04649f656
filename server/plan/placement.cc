#include "server/plan/placement.h"

#include <algorithm>
#include <numeric>

#include "server/plan/plan.h"
#include "server/spec/stored_planes.h"

namespace ballast {
namespace {

uint64_t BytesOf(const RunSpec& spec, const TensorSpec& t) {
  uint64_t bytes = ScaleCount(t) * sizeof(float);
  for (const kernels::Plane& plane : StoredPlanes(spec, t)) {
    Add(&bytes, AlignedPlaneBytes(plane, t.elements));
  }
  return bytes;
}

// What each device of the run may need beside the tensors themselves.
uint64_t SharedBytes(const Plan& whole) { return Sum(whole.bytes.gradients, whole.bytes.staging); }

Placement Spread(const RunSpec& spec, absl::Span<const uint64_t> free_bytes, uint64_t shared_bytes) {
  std::vector<uint64_t> stored, room;
  for (const TensorSpec& t : spec.tensors) stored.push_back(BytesOf(spec, t));
  for (const uint64_t bytes : free_bytes) room.push_back(bytes - std::min(bytes, shared_bytes));
  std::vector<uint32_t> by_size(spec.tensors.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::stable_sort(by_size.begin(), by_size.end(), [&](uint32_t a, uint32_t b) { return stored[a] > stored[b]; });
  std::vector<size_t> device_of(spec.tensors.size());
  for (const uint32_t i : by_size) {
    const auto roomiest = std::max_element(room.begin(), room.end());
    *roomiest -= std::min(*roomiest, stored[i]);
    device_of[i] = static_cast<size_t>(roomiest - room.begin());
  }
  Placement placement;
  for (const size_t device : device_of) {
    const auto known = std::find(placement.devices.begin(), placement.devices.end(), device);
    placement.shard_of.push_back(static_cast<uint32_t>(known - placement.devices.begin()));
    if (known == placement.devices.end()) placement.devices.push_back(device);
  }
  return placement;
}

bool Fits(const Plan& plan, absl::Span<const uint64_t> free_bytes, std::optional<uint64_t> host_free_bytes) {
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    const PlanBytes& bytes = plan.shards[s].bytes;
    const uint64_t there = host_free_bytes ? bytes.on_device() : bytes.total();
    if (there == kUncountable || there > free_bytes[plan.placement.devices[s]]) return false;
  }
  const uint64_t beside = plan.bytes.beside_device();
  return !host_free_bytes || (beside != kUncountable && beside <= *host_free_bytes);
}

}  // namespace

Placement OnOneDevice(const RunSpec& spec, size_t device) {
  return {.devices = {device}, .shard_of = std::vector<uint32_t>(spec.tensors.size())};
}

Placement Extended(Placement placement, const RunSpec& spec, absl::Span<const uint64_t> free_bytes) {
  std::vector<uint64_t> room;
  for (const size_t device : placement.devices) room.push_back(free_bytes[device]);
  for (size_t i = placement.shard_of.size(); i < spec.tensors.size(); ++i) {
    const auto roomiest = std::max_element(room.begin(), room.end());
    *roomiest -= std::min(*roomiest, BytesOf(spec, spec.tensors[i]));
    placement.shard_of.push_back(static_cast<uint32_t>(roomiest - room.begin()));
  }
  return placement;
}

std::optional<Placement> ChoosePlacement(const RunSpec& spec, absl::Span<const uint64_t> free_bytes,
                                         std::optional<uint64_t> host_free_bytes) {
  const auto roomiest = std::max_element(free_bytes.begin(), free_bytes.end());
  Placement placement = OnOneDevice(spec, static_cast<size_t>(roomiest - free_bytes.begin()));
  const Plan whole = MakePlan(spec, placement);
  if (Fits(whole, free_bytes, host_free_bytes)) return placement;
  if (free_bytes.size() == 1) return std::nullopt;
  placement = Spread(spec, free_bytes, SharedBytes(whole));
  if (!Fits(MakePlan(spec, placement), free_bytes, host_free_bytes)) return std::nullopt;
  return placement;
}

}  // namespace ballast
