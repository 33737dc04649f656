// Which planes a (rule, master, state) stores, in order: the master's, then each slot's codes and, where there is one,
// scales.
#pragma once

#include <array>
#include <iterator>
#include <utility>

#include "kernels/formats/format.h"
#include "kernels/registry.h"
#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr Kind kSlotKinds[kMaxSlots] = {Kind::kMomentum, Kind::kVariance};
inline constexpr const char* kSlotPlaneNames[kMaxSlots][2] = {{"momentum", "momentum.scale"},
                                                              {"variance", "variance.scale"}};

template <class Format>
constexpr int PlaneCount() {
  return static_cast<int>(std::size(Format::kPlanes));
}

template <class State, Slot kKind>
struct SlotFormat {
  using Type = typename State::Signed;
};
template <class State>
struct SlotFormat<State, Slot::kNonNegative> {
  using Type = typename State::NonNegative;
};

template <class Master>
constexpr auto MasterPlanes() {
  std::array<Plane, std::size(Master::kPlanes)> planes{};
  for (size_t i = 0; i < planes.size(); ++i) {
    planes[i] = {Master::kPlanes[i].suffix, Kind::kWeights, Master::kPlanes[i].bytes, Master::kPlanes[i].per};
  }
  return planes;
}

template <class Rule, class Master, class State>
struct Layout {
  static constexpr int kSlotCount = static_cast<int>(std::size(Rule::kSlots));
  template <int I>
  using SlotType = typename SlotFormat<State, Rule::kSlots[I]>::Type;

  template <int I>
  static constexpr int FirstPlane() {
    if constexpr (I == 0) {
      return PlaneCount<Master>();
    } else {
      return FirstPlane<I - 1>() + PlaneCount<SlotType<I - 1>>();
    }
  }

  static constexpr auto Planes() {
    std::array<Plane, FirstPlane<kSlotCount>()> planes{};
    const auto master = MasterPlanes<Master>();
    for (size_t i = 0; i < master.size(); ++i) planes[i] = master[i];
    AddSlots(planes.data(), std::make_integer_sequence<int, kSlotCount>());
    return planes;
  }

 private:
  template <int... I>
  static constexpr void AddSlots(Plane* planes, std::integer_sequence<int, I...>) {
    (AddSlot<I>(planes + FirstPlane<I>()), ...);
  }
  template <int I>
  static constexpr void AddSlot(Plane* planes) {
    for (int i = 0; i < PlaneCount<SlotType<I>>(); ++i) {
      const StoredPlane& p = SlotType<I>::kPlanes[i];
      planes[i] = {kSlotPlaneNames[I][i], kSlotKinds[I], p.bytes, p.per};
    }
  }
};

template <class Rule, class Master, class State>
inline constexpr auto kPlanesOf = Layout<Rule, Master, State>::Planes();

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
