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

  template <class V>
  static BALLAST_FN typename V::F Decode(typename V::U word) {
    const auto magnitude = V::And(word, V::SetBits(kSign - 1));
    // As an fp32 with the exponent field of the format: 2^(127-bias) too small, subnormals included.
    const auto small = V::FromBits(V::template ShiftLeft<kDrop>(magnitude));
    const auto finite = V::Bits(V::Mul(small, V::FromBits(V::SetBits((254 - kBias) << 23))));
    const auto beyond =
        V::Or(V::SetBits(kInfinityBits), V::template ShiftLeft<kDrop>(V::SubBits(magnitude, V::SetBits(kInfinity))));
    const auto infinite_only = kInfinity == kNan ? V::SetBits(kInfinityBits | 0x400000u) : beyond;
    const auto bits = V::SelectBits(V::GreaterBits(magnitude, V::SetBits(kLargest)), infinite_only, finite);
    const auto sign = V::And(word, V::SetBits(kSign));
    return V::FromBits(V::Or(bits, V::template ShiftLeft<31 - kExponentBits - kMantissaBits>(sign)));
  }

  template <class V>
  static BALLAST_FN typename V::U Encode(typename V::F x) {
    const auto bits = V::Bits(x);
    const auto magnitude = V::And(bits, V::SetBits(kMagnitude));
    const auto odd = V::And(V::template ShiftRight<kDrop>(magnitude), V::SetBits(1));
    const auto rounded = V::AddBits(magnitude, V::AddBits(V::SetBits((1u << (kDrop - 1)) - 1), odd));
    const auto normal = V::SubBits(V::template ShiftRight<kDrop>(rounded), V::SetBits((127 - kBias) << kMantissaBits));
    // Adding this power of two leaves the value, rounded to the subnormals' spacing, in the low mantissa bits.
    constexpr uint32_t kAnchor = (127 - kBias + 1 + kDrop) << 23;
    const auto shifted = V::Bits(V::Add(V::FromBits(magnitude), V::FromBits(V::SetBits(kAnchor))));
    const auto subnormal = V::SubBits(shifted, V::SetBits(kAnchor));
    const auto least_normal = V::SetBits((127 - kBias + 1) << 23);
    auto code = V::SelectBits(V::GreaterBits(least_normal, magnitude), subnormal, normal);
    code = V::MinBits(code, V::SetBits(kLargest));
    code = V::SelectBits(V::EqualBits(magnitude, V::SetBits(kInfinityBits)), V::SetBits(kInfinity), code);
    code = V::SelectBits(V::GreaterBits(magnitude, V::SetBits(kInfinityBits)), V::SetBits(kNan), code);
    return V::Or(code, SignOf<V>(bits));
  }

  // Of a finite value: away from zero with probability (what is cut off) / spacing. r < 2^16 is added below the cut, in
  // 2^-16 of the spacing; beyond the largest finite value it saturates.
  template <class V>
  static BALLAST_FN typename V::U EncodeStochastic(typename V::F x, typename V::U r) {
    static_assert(kDrop >= 16);
    const auto bits = V::Bits(x);
    const auto magnitude = V::And(bits, V::SetBits(kMagnitude));
    const auto raised = V::AddBits(magnitude, V::template ShiftLeft<kDrop - 16>(r));
    const auto normal = V::SubBits(V::template ShiftRight<kDrop>(raised), V::SetBits((127 - kBias) << kMantissaBits));
    constexpr uint32_t kAnchor = (127 - kBias + 1 + kDrop - 16) << 23;  // 2^16 times finer than Encode's
    const auto shifted = V::Bits(V::Add(V::FromBits(magnitude), V::FromBits(V::SetBits(kAnchor))));
    const auto subnormal = V::template ShiftRight<16>(V::AddBits(V::SubBits(shifted, V::SetBits(kAnchor)), r));
    const auto least_normal = V::SetBits((127 - kBias + 1) << 23);
    const auto code = V::SelectBits(V::GreaterBits(least_normal, magnitude), subnormal, normal);
    return V::Or(V::MinBits(code, V::SetBits(kLargest)), SignOf<V>(bits));
  }

 private:
  template <class V>
  static BALLAST_FN typename V::U SignOf(typename V::U bits) {
    return V::template ShiftRight<31 - kExponentBits - kMantissaBits>(V::And(bits, V::SetBits(kSignBit)));
  }
};

using Fp16 = SmallFloat<5, 10, 0x7bff, 0x7c00, 0x7e00>;
using Fp8E5M2 = SmallFloat<5, 2, 0x7b, 0x7c, 0x7e>;
using Fp8E4M3 = SmallFloat<4, 3, 0x7e, 0x7f, 0x7f>;

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
