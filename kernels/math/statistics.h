// The fixed order in which a tile's statistics are summed: 16 rows of 256 lanes; every lane adds its 16 terms in row
// order in fp32, then a tree over the lanes with strides 1, 2, 4, ... 128. Elements past the tensor's end add +0.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/registry.h"
#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr uint64_t kRow = 256;

// The tree over kCount lanes: a level at a time, into an array of its own, of which a compiler can make vectors.
template <uint64_t kCount>
float TotalOf(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    float sums[kCount / 2 > 0 ? kCount / 2 : 1];
    for (uint64_t i = 0; i < kCount / 2; ++i) sums[i] = values[2 * i] + values[2 * i + 1];
    return TotalOf<kCount / 2>(sums);
  }
}

// One sum over a tile.
class TileSum {
 public:
  float* lanes() { return lanes_; }
  void Clear() { std::memset(lanes_, 0, sizeof lanes_); }

  // Adds one vector of terms at lane i.
  template <class V>
  void Add(uint64_t i, typename V::F terms) {
    V::Store(lanes_ + i, V::Add(V::Load(lanes_ + i), terms));
  }

  float Total() const { return TotalOf<kRow>(lanes_); }

 private:
  alignas(64) float lanes_[kRow] = {};
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
