#include "server/spec/carry_over.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

namespace ballast {
namespace {

using kernels::Plane;
using kernels::PlaneKind;

std::vector<Plane> PlanesOf(const kernels::Kernel& kernel, PlaneKind kind) {
  std::vector<Plane> planes;
  std::copy_if(kernel.planes.begin(), kernel.planes.end(), std::back_inserter(planes),
               [kind](const Plane& plane) { return plane.kind == kind; });
  return planes;
}

bool SameShape(std::span<const Plane> a, std::span<const Plane> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Plane& p, const Plane& q) { return p.bytes == q.bytes && p.per == q.per; });
}

}  // namespace

const kernels::MomentCodec* StateCodec(const kernels::Kernel& kernel, PlaneKind kind) {
  const kernels::MomentFormat* const state = kernels::FindMomentFormat(kernel.state);
  if (state == nullptr || kind == PlaneKind::kWeights) return nullptr;
  const kernels::MomentCodec& codec = kind == PlaneKind::kMomentum ? state->momentum : state->variance;
  const std::vector<Plane> planes = PlanesOf(kernel, kind);  // beside the codec's own, a rule may keep more
  return !planes.empty() && SameShape(planes, codec.planes) ? &codec : nullptr;
}

CarryOver CarryOverOf(const kernels::Kernel& from, const kernels::Kernel& to, PlaneKind kind) {
  const bool weights = kind == PlaneKind::kWeights;
  const std::string_view format = weights ? from.master : from.state, wanted = weights ? to.master : to.state;
  const std::vector<Plane> planes = PlanesOf(from, kind), wanted_planes = PlanesOf(to, kind);
  if (planes.empty() && wanted_planes.empty()) return CarryOver::kAsItLies;
  if (format == wanted && SameShape(planes, wanted_planes)) return CarryOver::kAsItLies;
  if (weights) return CarryOver::kConverted;
  const bool both = StateCodec(from, kind) != nullptr && StateCodec(to, kind) != nullptr;
  return both ? CarryOver::kConverted : CarryOver::kImpossible;
}

}  // namespace ballast
