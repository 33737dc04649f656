// The fixed order in which a tile's statistics are summed: 16 rows of 256 lanes; every lane adds its 16 terms in row
// order in fp32, then a tree over the lanes with strides 1, 2, 4, ... 128. Elements past the tensor's end add +0.
#pragma once

#include <cstdint>

#include "kernels/lanes/scalar.h"
#include "kernels/registry.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr int kLanes = 256;

class TileSums {
 public:
  enum Term { kGradSq, kUpdateSq, kRmsSq, kWeightSq, kStoredDot, kTerms };

  // Adds the 32 terms of block `block` of the tile.
  void Add(Term term, uint64_t block, const float* terms) {
    float* lanes = lanes_[term] + block % (kLanes / kBlock) * kBlock;
    for (uint64_t i = 0; i < kBlock; ++i) lanes[i] += terms[i];
  }

  float Total(Term term) const {
    float sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = lanes_[term][i];
    for (int stride = 1; stride < kLanes; stride *= 2) {
      for (int i = 0; i < kLanes; i += 2 * stride) sums[i] += sums[i + stride];
    }
    return sums[0];
  }

 private:
  alignas(64) float lanes_[kTerms][kLanes] = {};
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
