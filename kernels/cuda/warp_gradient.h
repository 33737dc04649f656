// Measures a gradient in a tile before any update, on a GPU, by one warp, with the bits of WireFormat::measure.
// Written over a warp's vector type (simd/warp.h). Gradients are 16-byte aligned and readable up to the next multiple
// of 256 elements.
#pragma once

#include "kernels/cuda/warp_row.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// `row`: 256 numbers of this warp's own; on a GPU in shared memory.
template <class V, class Wire>
BALLAST_FN void MeasureGradientTile(const std::byte* in, uint64_t n, float scale, uint64_t tile, float* row,
                                    TileStatistics* out) {
  WarpSum<V> squares(row);
  squares.Clear();
  auto absmax = V::SetBits(0), nonfinite = V::SetBits(0);
  const uint64_t begin = tile * kTile, end = n < begin + kTile ? n : begin + kTile;
  for (uint64_t first = begin; first < end; first += kRow) {
    typename V::U packed[WordsEach(Wire::kBytes)];
    V::LoadVector(in + first * Wire::kBytes, packed);
    typename V::F grad[kEach];
    DecodeRow<V, Wire>(packed, scale, end - first < kRow ? end - first : kRow, grad);
    const GradientRange<V> range = RangeOf<V>(grad);
    absmax = V::MaxBits(absmax, range.largest_finite);
    if (V::Any(NotFinite<V>(range.most))) {
      nonfinite = V::AddBits(nonfinite, range.nonfinite);
      const auto bad = NotFinite<V>(OverBlock<V>(range.most));
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) grad[j] = V::Select(bad, V::Set(0.0f), grad[j]);
    }
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) grad[j] = V::Mul(grad[j], grad[j]);
    squares.Add(grad);
  }
  const auto zero = V::Set(0.0f);
  V::StoreOnce(&out->grad_sq, squares.Total());
  V::StoreOnce(&out->grad_absmax, V::FromBits(V::SetBits(V::Most(absmax))));
  V::StoreOnce(&out->nonfinite, V::Sum(nonfinite));
  V::StoreOnce(&out->update_sq, zero);
  V::StoreOnce(&out->rms_sq, zero);
  V::StoreOnce(&out->weight_sq, zero);
  V::StoreOnce(&out->stored_dot, zero);
  V::StoreOnce(&out->hi_dot, zero);
  V::StoreOnce(&out->rejected, 0);
  V::StoreOnce(&out->unchanged, 0);
  V::StoreOnce(&out->hi_unchanged, 0);
  V::StoreOnce(&out->saturated, 0);
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
