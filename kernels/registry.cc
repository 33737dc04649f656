#include "kernels/registry.h"

#include <algorithm>
#include <bit>

#include "kernels/cpu/tables.h"
#include "kernels/math/average.h"
#include "kernels/math/random.h"

namespace ballast::kernels {
namespace {

const IsaTables& Best() {
  static const IsaTables& best = *UsableIsas().back();
  return best;
}

template <class T, class Matches>
const T* Find(std::span<const T> all, Matches matches) {
  const auto found = std::find_if(all.begin(), all.end(), matches);
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

Statistics Combine(std::span<const TileStatistics> tiles, bool full) {
  Statistics s{};
  s.full = full;
  for (const TileStatistics& t : tiles) {
    s.grad_sq += t.grad_sq;
    s.update_sq += t.update_sq;
    s.rms_sq += t.rms_sq;
    s.grad_absmax = std::max(s.grad_absmax, static_cast<double>(t.grad_absmax));
    s.nonfinite += t.nonfinite;
    s.rejected += t.rejected;
    s.weight_sq += t.weight_sq;
    s.stored_dot += t.stored_dot;
    s.hi_dot += t.hi_dot;
    s.unchanged += t.unchanged;
    s.hi_unchanged += t.hi_unchanged;
    s.saturated += t.saturated;
  }
  return s;
}

Curvature Combine(std::span<const TileCurvature> tiles) {
  Curvature c{};
  for (const TileCurvature& t : tiles) {
    c.u_dg += static_cast<double>(t.u_dg);
    c.u_pu += static_cast<double>(t.u_pu);
    c.nonfinite += t.nonfinite;
  }
  return c;
}

CurvatureProbe ProbeOf(const Kernel& kernel, const std::byte* const* planes) {
  CurvatureProbe probe{};
  const std::byte **momentum = probe.momentum, **variance = probe.variance;
  for (size_t p = 0; p < kernel.planes.size(); ++p) {
    if (kernel.planes[p].kind == PlaneKind::kMomentum) *momentum++ = planes[p];
    if (kernel.planes[p].kind == PlaneKind::kVariance) *variance++ = planes[p];
  }
  return probe;
}

uint64_t AverageKey(uint64_t tensor_key, double decay) {
  return Fmix64(tensor_key ^ Fmix64(std::bit_cast<uint64_t>(decay)));
}
uint64_t RandomKey(uint64_t tensor_key, uint64_t step) { return Fmix64(tensor_key ^ Fmix64(step)); }

std::span<const Kernel> Kernels() { return Best().kernels; }
std::span<const MasterFormat> MasterFormats() { return Best().masters; }
std::span<const MomentFormat> MomentFormats() { return Best().states; }
std::span<const WireFormat> WireFormats() { return Best().wires; }
std::span<const char* const> RuleNames() { return Best().rules; }

const Kernel* FindKernel(std::string_view rule, std::string_view master, std::string_view state) {
  return Find(Kernels(), [&](const Kernel& k) { return k.rule == rule && k.master == master && k.state == state; });
}

const MasterFormat* FindMasterFormat(std::string_view name) {
  return Find(MasterFormats(), [&](const MasterFormat& m) { return m.name == name; });
}

const MasterFormat& AverageMaster() {
  static const MasterFormat& format = *FindMasterFormat(AverageFormat::kName);
  return format;
}

const MomentFormat* FindMomentFormat(std::string_view name) {
  return Find(MomentFormats(), [&](const MomentFormat& s) { return s.name == name; });
}

WireIndex FindWireFormat(std::string_view name) {
  const WireFormat* found = Find(WireFormats(), [&](const WireFormat& w) { return w.name == name; });
  return found == nullptr ? -1 : static_cast<WireIndex>(found - WireFormats().data());
}

const char* IsaName() { return Best().name; }

}  // namespace ballast::kernels
