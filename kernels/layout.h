// Which planes a (rule, master, state) stores, in order: the master's, then each slot's codes and, where there is one,
// scales.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "kernels/formats/format.h"
#include "kernels/registry.h"
#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr Kind kSlotKinds[kMaxSlots] = {Kind::kMomentum, Kind::kVariance, Kind::kVariance};
inline constexpr const char* kSlotPlaneNames[kMaxSlots][2] = {
    {"momentum", "momentum.scale"}, {"variance", "variance.scale"}, {"variance.lo", ""}};

template <class Format>
constexpr int PlaneCount() {
  return static_cast<int>(std::size(Format::kPlanes));
}

template <class State, Slot kSlot>
struct SlotFormat;
template <class State>
struct SlotFormat<State, Slot::kSigned> {
  using Type = typename State::Signed;
};
template <class State>
struct SlotFormat<State, Slot::kNonNegative> {
  using Type = typename State::NonNegative;
};
template <class State>
struct SlotFormat<State, Slot::kResidual> {
  using Type = typename State::Residual;
};

template <class Master>
constexpr auto MasterPlanes() {
  std::array<Plane, std::size(Master::kPlanes)> planes{};
  for (size_t i = 0; i < planes.size(); ++i) {
    planes[i] = {Master::kPlanes[i].suffix, Kind::kWeights, Master::kPlanes[i].bytes, Master::kPlanes[i].per};
  }
  return planes;
}

// Slot number `slot` of a rule, in the format S.
template <class S>
constexpr auto SlotPlanes(int slot) {
  std::array<Plane, std::size(S::kPlanes)> planes{};
  for (size_t i = 0; i < planes.size(); ++i) {
    planes[i] = {kSlotPlaneNames[slot][i], kSlotKinds[slot], S::kPlanes[i].bytes, S::kPlanes[i].per};
  }
  return planes;
}

// The format that slot I of a rule has in a state format.
template <class Rule, class State, int I>
using SlotAt = typename SlotFormat<State, Rule::kSlots[I]>::Type;

template <class Rule, class Master, class State>
constexpr auto MakePlanes() {
  constexpr int kSlotCount = static_cast<int>(std::size(Rule::kSlots));
  return []<int... I>(std::integer_sequence<int, I...>) {
    std::array<Plane, (PlaneCount<Master>() + ... + PlaneCount<SlotAt<Rule, State, I>>())> planes{};
    auto to = planes.begin();
    const auto add = [&to](const auto& some) { to = std::copy(some.begin(), some.end(), to); };
    add(MasterPlanes<Master>());
    (add(SlotPlanes<SlotAt<Rule, State, I>>(I)), ...);
    return planes;
  }
  (std::make_integer_sequence<int, kSlotCount>());
}

template <class Rule, class Master, class State>
inline constexpr auto kPlanesOf = MakePlanes<Rule, Master, State>();

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
