// Sums what ranks sent of a part of a gradient, in a tile, on a GPU, by one warp, with the bits of WireFormat::accumulate.
// Written over a warp's vector type (simd/warp.h). All memory is 16-byte aligned; what is read and written is in groups of
// eight elements, of which the part's last may be cut.
#pragma once

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/warp_row.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// A row of `n` elements from element `first` on, whose sum begins as DeviceSum says. The terms are added in their order.
template <class V, class Wire>
BALLAST_FN void AddTermsToRow(const DeviceSum& sum, uint64_t first, uint64_t n) {
  const typename V::M where = Inside<V>(n, 0);
  std::byte* const to = sum.to + first * sizeof(float);
  typename V::F values[kEach];
  const auto decode = [&](int term, typename V::F(&decoded)[kEach]) {
    typename V::U packed[WordsEach(Wire::kBytes)];
    V::LoadVector(sum.terms[term] + first * Wire::kBytes, packed, where);
    DecodeRow<V, Wire>(packed, 1, n, decoded);
  };
  int next = 0;
  if (!sum.first) {
    typename V::U bits[kEach];
    V::LoadVector(to, bits, where);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) values[j] = V::FromBits(bits[j]);
  } else if (sum.term_count > 0) {
    decode(next++, values);
  } else {
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) values[j] = V::FromBits(V::SetBits(kSignBit));
  }
  for (; next < sum.term_count; ++next) {
    typename V::F term[kEach];
    decode(next, term);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) values[j] = V::Add(values[j], term[j]);
  }
  typename V::U bits[kEach];
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) bits[j] = V::Bits(values[j]);
  V::StoreVector(to, bits, where);
}

// The one term as it is, or zeros.
template <class V, class Wire>
BALLAST_FN void CopyTermToRow(const DeviceSum& sum, uint64_t first, uint64_t n) {
  const typename V::M where = Inside<V>(n, 0);
  typename V::U packed[WordsEach(Wire::kBytes)];
  for (auto& word : packed) word = V::SetBits(0);
  if (sum.term_count > 0) V::LoadVector(sum.terms[0] + first * Wire::kBytes, packed, where);
  V::StoreVector(sum.to + first * Wire::kBytes, packed, where);
}

template <class V>
BALLAST_FN void SumTermsInTile(const DeviceSum& sum, uint64_t tile) {
  WithWire(sum.format, WireList{}, [&]<class Wire>() {
    if constexpr (Wire::kGradient) {
      const uint64_t begin = tile * kTile, end = sum.n < begin + kTile ? sum.n : begin + kTile;
      for (uint64_t first = begin; first < end; first += kRow) {
        const uint64_t n = end - first < kRow ? end - first : kRow;
        sum.adds ? AddTermsToRow<V, Wire>(sum, first, n) : CopyTermToRow<V, Wire>(sum, first, n);
      }
    }
  });
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
