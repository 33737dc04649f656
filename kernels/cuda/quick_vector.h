// A warp's vector type that divides and takes roots without a look at the operands, as the hardware's own sequences do
// after one: from an approximation, by fused multiplications, to the number rounded to nearest. 4 to 8 instructions that
// overlap with their neighbours', where a checked division is a dozen and a branch.
//
// Correctly rounded (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990) where
// the operands are as simd/division.h says; a root's is 0 or at least kLeastRoot. tests/kernels/cuda/gpu_identity.cc
// holds every mantissa against the checked operations on the GPU at hand.
#pragma once

#include "kernels/simd/vector.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <class V>
struct QuickVector : V {
  using F = typename V::F;

  static constexpr uint32_t kLeastRoot =
      0x0d000000u;  // the bits of 2^-101, of which the square's error is still normal

  static BALLAST_FN F Inverse(F x) {
    const F y = V::NearInverse(x);
    return V::Fma(V::Fnma(x, y, V::Set(1.0f)), y, y);
  }
  static BALLAST_FN F DivIntegers(F a, F b) { return Corrected(a, b, V::NearInverse(b), V::Mul(a, V::NearInverse(b))); }
  static BALLAST_FN F DivScales(F a, F b) {
    const F y = Inverse(b);
    return Corrected(a, b, y, Corrected(a, b, y, V::Mul(a, y)));
  }
  static BALLAST_FN F Sqrt(F x) {
    const F y = V::NearInverseRoot(V::Max(x, V::Set(0x1p-126f)));  // finite, so that the root of 0 is 0
    const F root = V::Mul(x, y);
    return V::Fma(V::Fnma(root, root, x), V::Mul(V::Set(0.5f), y), root);
  }

 private:
  // q, which is near a / b, less its error; y is near 1 / b.
  static BALLAST_FN F Corrected(F a, F b, F y, F q) { return V::Fma(V::Fnma(b, q, a), y, q); }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
