// Values as moments have them.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/tensor.h"

namespace ballast::kernels {

// Blocks of every size between 2^-60 and 2^10, with zeros; v is never negative.
inline std::vector<float> MomentsOfEverySize(PlaneKind kind, uint64_t n) {
  Normals random(n);
  std::vector<float> values(n);
  double scale = 0;
  for (uint64_t i = 0; i < n; ++i) {
    if (i % kBlock == 0) scale = std::exp2(10 - 70 * random.Uniform());
    const double x = i % 11 == 0 ? 0 : scale * random.Next();
    values[i] = static_cast<float>(kind == PlaneKind::kMomentum ? x : x * x);
  }
  return values;
}

}  // namespace ballast::kernels
