// Which planes a (rule, master, state) stores, in order: the master's, then each moment's codes and, where there is
// one, scales.
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

inline constexpr PlaneKind kMomentKinds[kMaxMoments] = {PlaneKind::kMomentum, PlaneKind::kVariance,
                                                        PlaneKind::kVariance};
inline constexpr const char* kMomentPlaneNames[kMaxMoments][2] = {
    {"momentum", "momentum.scale"}, {"variance", "variance.scale"}, {"variance.lo", ""}};

template <class Format>
constexpr int PlaneCount() {
  return static_cast<int>(std::size(Format::kPlanes));
}

template <class State, Moment kMoment>
struct FormatOfMoment;
template <class State>
struct FormatOfMoment<State, Moment::kSigned> {
  using Type = typename State::Signed;
};
template <class State>
struct FormatOfMoment<State, Moment::kNonNegative> {
  using Type = typename State::NonNegative;
};
template <class State>
struct FormatOfMoment<State, Moment::kResidual> {
  using Type = typename State::Residual;
};

template <class Master>
constexpr auto MasterPlanes() {
  std::array<Plane, std::size(Master::kPlanes)> planes{};
  for (size_t i = 0; i < planes.size(); ++i) {
    planes[i] = {Master::kPlanes[i].suffix, PlaneKind::kWeights, Master::kPlanes[i].bytes, Master::kPlanes[i].per};
  }
  return planes;
}

// Moment number `moment` of a rule, in the format S.
template <class S>
constexpr auto MomentPlanes(int moment) {
  std::array<Plane, std::size(S::kPlanes)> planes{};
  for (size_t i = 0; i < planes.size(); ++i) {
    planes[i] = {kMomentPlaneNames[moment][i], kMomentKinds[moment], S::kPlanes[i].bytes, S::kPlanes[i].per};
  }
  return planes;
}

// The format that moment I of a rule has in a state format.
template <class Rule, class State, int I>
using MomentAt = typename FormatOfMoment<State, Rule::kMoments[I]>::Type;

template <class Rule, class Master, class State>
constexpr auto MakePlanes() {
  constexpr int kMomentCount = static_cast<int>(std::size(Rule::kMoments));
  return []<int... I>(std::integer_sequence<int, I...>) {
    std::array<Plane, (PlaneCount<Master>() + ... + PlaneCount<MomentAt<Rule, State, I>>())> planes{};
    auto to = planes.begin();
    const auto add = [&to](const auto& some) { to = std::copy(some.begin(), some.end(), to); };
    add(MasterPlanes<Master>());
    (add(MomentPlanes<MomentAt<Rule, State, I>>(I)), ...);
    return planes;
  }
  (std::make_integer_sequence<int, kMomentCount>());
}

template <class Rule, class Master, class State>
inline constexpr auto kPlanesOf = MakePlanes<Rule, Master, State>();

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
