// The curvature along a tensor's last update on a GPU: one warp probes a sampled tile, with the bits of
// cpu_curvature.h. Written over a warp's vector type (simd/warp.h). Gradients are 16-byte aligned and readable up to
// the next multiple of 256 elements.
#pragma once

#include "kernels/cuda/warp_row.h"
#include "kernels/math/curvature.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr int kProbeRows = 2;  // the sums of a tile, in shared memory

template <class V, class State>
class WarpProbe {
 public:
  using F = typename V::F;
  using U = typename V::U;

  // `rows`: kProbeRows * 256 numbers of this warp's own; on a GPU in shared memory.
  BALLAST_FN WarpProbe(const CurvatureProbe& probe, float* rows) : probe_(probe), u_dg_(rows), u_pu_(rows + kRow) {}

  BALLAST_FN void Run(uint64_t sampled, TileCurvature* out) {
    u_dg_.Clear();
    u_pu_.Clear();
    nonfinite_ = V::SetBits(0);
    const uint64_t begin = sampled * kCurvatureEvery * kTile, end = probe_.n < begin + kTile ? probe_.n : begin + kTile;
    auto* before = reinterpret_cast<std::byte*>(probe_.before + sampled * kTile);
    for (uint64_t first = begin; first < end; first += kRow, before += kRow * sizeof(float)) {
      Row(first, end - first < kRow ? end - first : kRow, before);
    }
    V::StoreOnce(&out->u_dg, u_dg_.Total());
    V::StoreOnce(&out->u_pu, u_pu_.Total());
    V::StoreOnce(&out->nonfinite, V::Sum(nonfinite_));
  }

 private:
  BALLAST_FN void Row(uint64_t first, uint64_t count, std::byte* before) {
    F grad[kEach];
    LoadGradient(first, count, grad);
    if (!probe_.first) AddRow(first, count, before, grad);
    U kept[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) kept[j] = V::Bits(grad[j]);
    V::StoreVector(before, kept, V::EqualBits(V::SetBits(0), V::SetBits(0)));
  }

  BALLAST_FN void LoadGradient(uint64_t first, uint64_t count, F (&grad)[kEach]) const {
    const std::byte* const in = static_cast<const std::byte*>(probe_.grad);
    WithWire(probe_.grad_format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kGradient) {
        U packed[WordsEach(Wire::kBytes)];
        V::LoadVector(in + first * Wire::kBytes, packed);
        DecodeRow<V, Wire>(packed, probe_.grad_scale, count, grad);
      }
    });
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      if (probe_.clip != 1) grad[j] = V::Mul(grad[j], V::Set(probe_.clip));
      const auto nan = NotFinite<V>(MagnitudeOf<V>(grad[j]));
      grad[j] = V::Select(nan, V::FromBits(V::SetBits(kInfinityBits)), grad[j]);
    }
  }

  BALLAST_FN void AddRow(uint64_t first, uint64_t count, const std::byte* before, const F (&grad)[kEach]) {
    U last[kEach];
    V::LoadVector(before, last);
    F m[kEach], v[kEach], u_dg[kEach], u_pu[kEach];
    DecodeMoment<typename State::Signed>(probe_.momentum, first, m);
    DecodeMoment<typename State::NonNegative>(probe_.variance, first, v);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      const auto t = TermsOf<V>(probe_.preconditioner, m[j], v[j], grad[j], V::FromBits(last[j]));
      const auto most = V::MaxBits(MagnitudeOf<V>(t.u_dg), MagnitudeOf<V>(t.u_pu));
      const auto inside = Inside<V>(count, j), bad = NotFinite<V>(most);
      nonfinite_ = V::IncrementIf(V::Both(inside, bad), nonfinite_);
      const auto adds = V::Both(inside, V::Not(bad));
      u_dg[j] = V::Select(adds, t.u_dg, V::Set(0.0f));
      u_pu[j] = V::Select(adds, t.u_pu, V::Set(0.0f));
    }
    u_dg_.Add(u_dg);
    u_pu_.Add(u_pu);
  }

  template <class S>
  BALLAST_FN void DecodeMoment(const std::byte* const* planes, uint64_t first, F (&out)[kEach]) const {
    constexpr StoredPlane kCodes = S::kPlanes[0];
    U packed[WordsEach(kCodes.bytes)], codes[kEach];
    V::LoadVector(planes[0] + first * kCodes.bytes, packed);
    Unpack<V, kCodes.bytes, kCodes.sign>(packed, codes);
    auto scale = V::SetBits(0);
    if constexpr (S::kScalePer > 0) {
      constexpr uint32_t kBytes = S::kPlanes[1].bytes;
      scale = V::template LoadScale<kBytes, S::kScalePer>(planes[1] + first / S::kScalePer * kBytes);
    }
    const auto decoder = DecoderOf<V, S>(scale);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = decoder.Decode(codes[j]);
  }

  const CurvatureProbe& probe_;
  WarpSum<V> u_dg_, u_pu_;
  U nonfinite_;  // the thread's
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
