// The curvature along a tensor's last update on a GPU: one warp probes a sampled tile, with the bits of
// cpu_curvature.h. Written over a warp lane (simd/warp.h). Gradients are 16-byte aligned and readable up to the next
// multiple of 256 elements.
#pragma once

#include "kernels/cuda/warp_row.h"
#include "kernels/math/curvature.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr int kProbeRows = 2;  // the sums of a tile, in shared memory

template <class L, class State>
class WarpProbe {
 public:
  using F = typename L::F;
  using U = typename L::U;

  // `rows`: kProbeRows * 256 numbers of this warp's own; on a GPU in shared memory.
  BALLAST_FN WarpProbe(const CurvatureProbe& probe, float* rows) : probe_(probe), u_dg_(rows), u_pu_(rows + kRow) {}

  BALLAST_FN void Run(uint64_t sampled, TileCurvature* out) {
    u_dg_.Clear();
    u_pu_.Clear();
    nonfinite_ = L::SetBits(0);
    const uint64_t begin = sampled * kCurvatureEvery * kTile, end = probe_.n < begin + kTile ? probe_.n : begin + kTile;
    auto* before = reinterpret_cast<std::byte*>(probe_.before + sampled * kTile);
    for (uint64_t first = begin; first < end; first += kRow, before += kRow * sizeof(float)) {
      Row(first, end - first < kRow ? end - first : kRow, before);
    }
    L::StoreOnce(&out->u_dg, u_dg_.Total());
    L::StoreOnce(&out->u_pu, u_pu_.Total());
    L::StoreOnce(&out->nonfinite, L::Sum(nonfinite_));
  }

 private:
  BALLAST_FN void Row(uint64_t first, uint64_t count, std::byte* before) {
    F grad[kEach];
    LoadGradient(first, count, grad);
    if (!probe_.first) AddRow(first, count, before, grad);
    U kept[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) kept[j] = L::Bits(grad[j]);
    L::StoreVector(before, kept, L::EqualBits(L::SetBits(0), L::SetBits(0)));
  }

  BALLAST_FN void LoadGradient(uint64_t first, uint64_t count, F (&grad)[kEach]) const {
    const std::byte* const in = static_cast<const std::byte*>(probe_.grad);
    WithWire(probe_.grad_format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kGradient) {
        U packed[WordsEach(Wire::kBytes)];
        L::LoadVector(in + first * Wire::kBytes, packed);
        DecodeRow<L, Wire>(packed, probe_.grad_scale, count, grad);
      }
    });
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      if (probe_.clip != 1) grad[j] = L::Mul(grad[j], L::Set(probe_.clip));
      const auto nan = NotFinite<L>(MagnitudeOf<L>(grad[j]));
      grad[j] = L::Select(nan, L::FromBits(L::SetBits(kInfinityBits)), grad[j]);
    }
  }

  BALLAST_FN void AddRow(uint64_t first, uint64_t count, const std::byte* before, const F (&grad)[kEach]) {
    U last[kEach];
    L::LoadVector(before, last);
    F m[kEach], v[kEach], u_dg[kEach], u_pu[kEach];
    DecodeSlot<typename State::Signed>(probe_.momentum, first, m);
    DecodeSlot<typename State::NonNegative>(probe_.variance, first, v);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      const auto t = TermsOf<L>(probe_.preconditioner, m[j], v[j], grad[j], L::FromBits(last[j]));
      const auto most = L::MaxBits(MagnitudeOf<L>(t.u_dg), MagnitudeOf<L>(t.u_pu));
      const auto inside = Inside<L>(count, j), bad = NotFinite<L>(most);
      nonfinite_ = L::IncrementIf(L::Both(inside, bad), nonfinite_);
      const auto adds = L::Both(inside, L::Not(bad));
      u_dg[j] = L::Select(adds, t.u_dg, L::Set(0.0f));
      u_pu[j] = L::Select(adds, t.u_pu, L::Set(0.0f));
    }
    u_dg_.Add(u_dg);
    u_pu_.Add(u_pu);
  }

  template <class S>
  BALLAST_FN void DecodeSlot(const std::byte* const* planes, uint64_t first, F (&out)[kEach]) const {
    constexpr StoredPlane kCodes = S::kPlanes[0];
    U packed[WordsEach(kCodes.bytes)], codes[kEach];
    L::LoadVector(planes[0] + first * kCodes.bytes, packed);
    Unpack<L, kCodes.bytes, kCodes.sign>(packed, codes);
    auto scale = L::SetBits(0);
    if constexpr (S::kScalePer > 0) {
      constexpr uint32_t kBytes = S::kPlanes[1].bytes;
      scale = L::template LoadScale<kBytes, S::kScalePer>(planes[1] + first / S::kScalePer * kBytes);
    }
    const auto decoder = DecoderOf<L, S>(scale);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = decoder.Decode(codes[j]);
  }

  const CurvatureProbe& probe_;
  WarpSum<L> u_dg_, u_pu_;
  U nonfinite_;  // the thread's
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
