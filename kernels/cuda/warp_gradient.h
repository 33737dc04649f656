// Measures a gradient in a tile before any update, on a GPU, by one warp, with the bits of WireFormat::measure.
// Written over a warp lane (simd/warp.h). Gradients are 16-byte aligned and readable up to the next multiple of 256
// elements.
#pragma once

#include "kernels/cuda/warp_row.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// `row`: 256 numbers of this warp's own; on a GPU in shared memory.
template <class L, class Wire>
BALLAST_FN void MeasureGradientTile(const std::byte* in, uint64_t n, float scale, uint64_t tile, float* row,
                                    TileStatistics* out) {
  WarpSum<L> squares(row);
  squares.Clear();
  auto absmax = L::SetBits(0), nonfinite = L::SetBits(0);
  const uint64_t begin = tile * kTile, end = n < begin + kTile ? n : begin + kTile;
  for (uint64_t first = begin; first < end; first += kRow) {
    typename L::U packed[WordsEach(Wire::kBytes)];
    L::LoadVector(in + first * Wire::kBytes, packed);
    typename L::F grad[kEach];
    DecodeRow<L, Wire>(packed, scale, end - first < kRow ? end - first : kRow, grad);
    const GradientRange<L> range = RangeOf<L>(grad);
    absmax = L::MaxBits(absmax, range.largest_finite);
    if (L::Any(NotFinite<L>(range.most))) {
      nonfinite = L::AddBits(nonfinite, range.nonfinite);
      const auto bad = NotFinite<L>(OverBlock<L>(range.most));
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) grad[j] = L::Select(bad, L::Set(0.0f), grad[j]);
    }
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) grad[j] = L::Mul(grad[j], grad[j]);
    squares.Add(grad);
  }
  const auto zero = L::Set(0.0f);
  L::StoreOnce(&out->grad_sq, squares.Total());
  L::StoreOnce(&out->grad_absmax, L::FromBits(L::SetBits(L::Most(absmax))));
  L::StoreOnce(&out->nonfinite, L::Sum(nonfinite));
  L::StoreOnce(&out->update_sq, zero);
  L::StoreOnce(&out->rms_sq, zero);
  L::StoreOnce(&out->weight_sq, zero);
  L::StoreOnce(&out->stored_dot, zero);
  L::StoreOnce(&out->hi_dot, zero);
  L::StoreOnce(&out->rejected, 0);
  L::StoreOnce(&out->unchanged, 0);
  L::StoreOnce(&out->hi_unchanged, 0);
  L::StoreOnce(&out->saturated, 0);
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
