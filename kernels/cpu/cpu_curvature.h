// The curvature along a tensor's last update on CPUs: a row of 256 elements at a time, only of sampled tiles. It
// depends on neither the master nor the rule, so it is compiled once for each state format.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cpu/cpu_rows.h"
#include "kernels/lists.h"
#include "kernels/math/curvature.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <class V, class State>
class CpuCurvature {
 public:
  explicit CpuCurvature(const CurvatureProbe& probe)
      : probe_(probe), load_(GradientLoaders<V, WireList>::Of(probe.grad_format)) {}

  TileCurvature ProbeCurvature(uint64_t sampled) {
    u_dg_.Clear();
    u_pu_.Clear();
    nonfinite_ = 0;
    const uint64_t begin = sampled * kCurvatureEvery * kTile, end = std::min(probe_.n, begin + kTile);
    float* before = probe_.before + sampled * kTile;
    for (uint64_t first = begin; first < end; first += kRow, before += kRow) {
      const uint64_t count = std::min(kRow, end - first);
      LoadGradient(first, count);
      if (!probe_.first) AddRow(first, count, before);
      std::copy_n(grad_, kRow, before);
    }
    return {u_dg_.Total(), u_pu_.Total(), nonfinite_};
  }

 private:
  using Signed = typename State::Signed;
  using NonNegative = typename State::NonNegative;

  static bool Finite(float x) { return (std::bit_cast<uint32_t>(x) & kMagnitude) < kInfinityBits; }

  // Loads the gradient as the update does, but keeps NaN as infinity, since a NaN's bits differ between devices.
  void LoadGradient(uint64_t first, uint64_t count) {
    const std::byte* const in = static_cast<const std::byte*>(probe_.grad);
    uint32_t largest = load_(in, first, count, probe_.grad_scale, grad_);
    if (probe_.clip != 1) largest = ClipRow<V>(probe_.clip, grad_);
    if (largest < kInfinityBits) return;
    for (float& g : grad_) g = Finite(g) ? g : std::bit_cast<float>(kInfinityBits);
  }

  void AddRow(uint64_t first, uint64_t count, const float* before) {
    RowDecoder<V, Signed> momentum;
    RowDecoder<V, NonNegative> variance;
    momentum.Load(0, probe_.momentum, first);
    variance.Load(0, probe_.variance, first);
    auto most = V::SetBits(0);
    for (uint64_t i = 0; i < kRow; i += V::kWidth) {
      const auto m = momentum.At(i / kBlock).Decode(LoadWords<V, Signed, 0>(probe_.momentum[0], first + i));
      const auto v = variance.At(i / kBlock).Decode(LoadWords<V, NonNegative, 0>(probe_.variance[0], first + i));
      const auto t = TermsOf<V>(probe_.preconditioner, m, v, V::Load(grad_ + i), V::Load(before + i));
      V::Store(dg_ + i, t.u_dg);
      V::Store(pu_ + i, t.u_pu);
      const auto larger = V::MaxBits(Magnitude<V>(t.u_dg), Magnitude<V>(t.u_pu));
      most = V::MaxBits(most, larger);
    }
    std::fill(dg_ + count, dg_ + kRow, 0.0f);
    std::fill(pu_ + count, pu_ + kRow, 0.0f);
    if (V::Largest(most) >= kInfinityBits) DropNonFinite(count);
    for (uint64_t i = 0; i < kRow; i += V::kWidth) {
      u_dg_.template Add<V>(i, V::Load(dg_ + i));
      u_pu_.template Add<V>(i, V::Load(pu_ + i));
    }
  }

  void DropNonFinite(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      if (Finite(dg_[i]) && Finite(pu_[i])) continue;
      ++nonfinite_;
      dg_[i] = pu_[i] = 0;
    }
  }

  const CurvatureProbe& probe_;
  const GradientLoader load_;
  alignas(64) float grad_[kRow], dg_[kRow], pu_[kRow];  // of the row in hand: g, and the terms
  TileSum u_dg_, u_pu_;
  uint32_t nonfinite_ = 0;
};

template <class V, class State>
void ProbeTiles(const CurvatureProbe& probe, uint64_t first, uint64_t last, TileCurvature* sums) {
  CpuCurvature<V, State> curvature(probe);
  for (uint64_t sampled = first; sampled < last; ++sampled) sums[sampled - first] = curvature.ProbeCurvature(sampled);
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
