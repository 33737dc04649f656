// What a run keeps of a tensor, by the names that Pull has for it. A value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

#include "kernels/registry.h"

namespace ballast {

enum class StateSlot : uint8_t { kWeights, kMaster, kMomentum, kVariance, kUpdates };
inline constexpr const char* kStateSlotNames[] = {"weights", "master", "momentum", "variance", "updates"};

inline const char* NameOf(StateSlot slot) { return kStateSlotNames[static_cast<size_t>(slot)]; }

inline std::optional<StateSlot> FindStateSlot(std::string_view name) {
  for (size_t i = 0; i < std::size(kStateSlotNames); ++i) {
    if (name == kStateSlotNames[i]) return static_cast<StateSlot>(i);
  }
  return std::nullopt;
}

// The kind of the planes that hold it.
constexpr kernels::PlaneKind KindOf(StateSlot slot) {
  if (slot == StateSlot::kMomentum) return kernels::PlaneKind::kMomentum;
  return slot == StateSlot::kVariance ? kernels::PlaneKind::kVariance : kernels::PlaneKind::kWeights;
}

}  // namespace ballast
