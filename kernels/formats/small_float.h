// Binary floats of a word or less: fp16, and OCP's fp8 in both kinds (Micikevicius et al., arXiv 2209.05433).
//
// Encode rounds to nearest even; a finite value beyond the largest finite one saturates to it, so that serving a weight
// makes no infinity; an infinity stays one, or becomes NaN where the format has none.
#pragma once

#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// kLargest: the code of the largest finite value. kInfinity: that of infinity, or of NaN in a format without one.
template <int kExponentBits, int kMantissaBits, uint32_t kLargest, uint32_t kInfinity, uint32_t kNan>
struct SmallFloat {
  static constexpr int kDrop = 23 - kMantissaBits;
  static constexpr uint32_t kBias = (1u << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kSign = 1u << (kExponentBits + kMantissaBits);

  template <class L>
  static BALLAST_FN typename L::F Decode(typename L::U word) {
    const auto magnitude = L::And(word, L::SetBits(kSign - 1));
    // As an fp32 with the exponent field of the format: 2^(127-bias) too small, subnormals included.
    const auto small = L::FromBits(L::template ShiftLeft<kDrop>(magnitude));
    const auto finite = L::Bits(L::Mul(small, L::FromBits(L::SetBits((254 - kBias) << 23))));
    const auto beyond =
        L::Or(L::SetBits(kInfinityBits), L::template ShiftLeft<kDrop>(L::SubBits(magnitude, L::SetBits(kInfinity))));
    const auto infinite_only = kInfinity == kNan ? L::SetBits(kInfinityBits | 0x400000u) : beyond;
    const auto bits = L::SelectBits(L::GreaterBits(magnitude, L::SetBits(kLargest)), infinite_only, finite);
    const auto sign = L::And(word, L::SetBits(kSign));
    return L::FromBits(L::Or(bits, L::template ShiftLeft<31 - kExponentBits - kMantissaBits>(sign)));
  }

  template <class L>
  static BALLAST_FN typename L::U Encode(typename L::F x) {
    const auto bits = L::Bits(x);
    const auto magnitude = L::And(bits, L::SetBits(kMagnitude));
    const auto odd = L::And(L::template ShiftRight<kDrop>(magnitude), L::SetBits(1));
    const auto rounded = L::AddBits(magnitude, L::AddBits(L::SetBits((1u << (kDrop - 1)) - 1), odd));
    const auto normal = L::SubBits(L::template ShiftRight<kDrop>(rounded), L::SetBits((127 - kBias) << kMantissaBits));
    // Adding this power of two leaves the value, rounded to the subnormals' spacing, in the low mantissa bits.
    constexpr uint32_t kAnchor = (127 - kBias + 1 + kDrop) << 23;
    const auto shifted = L::Bits(L::Add(L::FromBits(magnitude), L::FromBits(L::SetBits(kAnchor))));
    const auto subnormal = L::SubBits(shifted, L::SetBits(kAnchor));
    const auto least_normal = L::SetBits((127 - kBias + 1) << 23);
    auto code = L::SelectBits(L::GreaterBits(least_normal, magnitude), subnormal, normal);
    code = L::MinBits(code, L::SetBits(kLargest));
    code = L::SelectBits(L::EqualBits(magnitude, L::SetBits(kInfinityBits)), L::SetBits(kInfinity), code);
    code = L::SelectBits(L::GreaterBits(magnitude, L::SetBits(kInfinityBits)), L::SetBits(kNan), code);
    const auto sign = L::template ShiftRight<31 - kExponentBits - kMantissaBits>(L::And(bits, L::SetBits(kSignBit)));
    return L::Or(code, sign);
  }
};

using Fp16 = SmallFloat<5, 10, 0x7bff, 0x7c00, 0x7e00>;
using Fp8E5M2 = SmallFloat<5, 2, 0x7b, 0x7c, 0x7e>;
using Fp8E4M3 = SmallFloat<4, 3, 0x7e, 0x7f, 0x7f>;

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
