// FlashOptim's codecs, for import, export and comparison.
//
// flash24, flash32: a bf16 weight n = RN(x) and a signed fraction q of its half ulp, N = 127 or 32767:
//   h = 2^(E(n)-8), E of zero and subnormals 1-bias;  q = N(x-n)/h, halves away from zero;  decode n + (q/N)h
// The scale is applied in two exact powers of two, since one alone over- or underflows.
//
// flash8: 8-bit codes with an fp16 scale A for each block of 32, nearest; A >= 1e-12 divides, fp16(A) multiplies.
//   m: z = m/A, y = 2z/(1+|z|), code = floor(127y + .5);   y = code/127, z = y/(2-|y|), m' = z A
//   v: r = sqrt(v), code = floor(255 r/A + .5);            v' = ((code/255) A)^2
// A block whose A would be infinite in fp16 is rejected; there the published code goes on with infinities.
#pragma once

#include "kernels/formats/bf16.h"
#include "kernels/formats/format.h"
#include "kernels/formats/small_float.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// To the nearest integer of |y| < 2^23, halves away from zero; as a signed integer.
template <class L>
BALLAST_FN typename L::U RoundHalfAway(typename L::F y) {
  const auto magnitude = L::Abs(y);
  const auto k = L::Truncate(magnitude);
  const auto up = L::LessEqual(L::Set(0.5f), L::Sub(magnitude, L::FromInteger(k)));
  const auto sign = L::template ShiftRightSigned<31>(L::Bits(y));
  return L::SubBits(L::Xor(L::IncrementIf(up, k), sign), sign);
}

// floor(y + .5) with the sum rounded, as a signed integer.
template <class L>
BALLAST_FN typename L::U FloorOfHalfMore(typename L::F y) {
  const auto sum = L::Add(y, L::Set(0.5f));
  const auto k = L::Truncate(sum);
  const auto below = L::Less(sum, L::FromInteger(k));  // k was rounded up, towards zero
  return L::SubBits(k, L::SelectBits(below, L::SetBits(1), L::SetBits(0)));
}

template <int N>
struct Flash {
  static constexpr bool kPaired = false;
  static constexpr bool kManyRegisters = true;
  static constexpr uint32_t kSaturated = kSaturatedBf16;

  // Two powers of two whose product is h = 2^(E-8), of the biased exponent e >= 1 of n; or of 1/h.
  template <class L>
  struct TwoSteps {
    typename L::F first, second;
  };
  template <class L>
  static BALLAST_FN typename L::U BiasedExponent(typename L::U word) {
    const auto e = L::And(L::template ShiftRight<7>(word), L::SetBits(0xff));
    return L::MaxBits(e, L::SetBits(1));
  }
  template <class L>
  static BALLAST_FN TwoSteps<L> PowerOfTwo(typename L::U exponent) {  // signed, -300 < exponent < 300
    const auto half = L::template ShiftRightSigned<1>(exponent);
    const auto rest = L::SubBits(exponent, half);
    const auto power = [](typename L::U p) {
      return L::FromBits(L::template ShiftLeft<23>(L::AddBits(p, L::SetBits(127))));
    };
    return {power(half), power(rest)};
  }

  template <class L>
  static BALLAST_FN typename L::F Decode(const Words<L>& w) {
    const auto n = FromBf16<L>(w.word[0]);
    const auto h = PowerOfTwo<L>(L::SubBits(BiasedExponent<L>(w.word[0]), L::SetBits(127 + 8)));
    const auto fraction = L::Div(L::FromInteger(w.word[1]), L::Set(static_cast<float>(N)));
    return L::Add(n, L::Mul(L::Mul(fraction, h.first), h.second));
  }

  template <class L, bool>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U) {
    const auto word = NearestBf16Word<L>(x);
    const auto residual = L::Sub(x, FromBf16<L>(word));
    const auto inverse = PowerOfTwo<L>(L::SubBits(L::SetBits(127 + 8), BiasedExponent<L>(word)));
    const auto scaled = L::Mul(L::Mul(residual, inverse.first), inverse.second);
    return {{word, RoundHalfAway<L>(L::Mul(L::Set(static_cast<float>(N)), scaled))}};
  }
};

struct Flash24 : Flash<127> {
  static constexpr const char* kName = "flash24";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 1, 1, true}};
};

struct Flash32 : Flash<32767> {
  static constexpr const char* kName = "flash32";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 2, 1, true}};
};

struct Flash8Slot {
  static constexpr uint32_t kScalePer = 32;
  static constexpr uint32_t kLargestBits = 0x477fefffu;  // below 65520, which fp16 rounds to infinity

  template <class L>
  static BALLAST_FN typename L::U Scale(typename L::U absmax) {
    return Fp16::Encode<L>(Divisor<L>(absmax));
  }
  template <class L>
  static BALLAST_FN typename L::F Divisor(typename L::U absmax) {
    return L::Max(L::FromBits(absmax), L::Set(1e-12f));
  }

  template <class L>
  struct Decoder {
    static constexpr int kNumbers = 1;
    typename L::F number[1];  // fp16(A)
    static BALLAST_FN auto Numbers(typename L::U scale) { return Decoder{{Fp16::Decode<L>(scale)}}; }
  };
  template <class L>
  struct Encoder {
    static constexpr int kNumbers = 1;
    typename L::F number[1];  // A
    static BALLAST_FN auto Numbers(typename L::U absmax) { return Encoder{{Divisor<L>(absmax)}}; }
  };
};

struct Flash8Signed : Flash8Slot {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1, true}, {"scale", 2, 32}};
  static constexpr bool kStoresRoot = false;

  template <class L>
  struct Decoder : Flash8Slot::Decoder<L> {
    static BALLAST_FN Decoder Of(typename L::U scale) { return {Flash8Slot::Decoder<L>::Numbers(scale)}; }
    BALLAST_FN typename L::F Decode(typename L::U code) const {
      const auto y = L::Div(L::FromInteger(code), L::Set(127.0f));
      return L::Mul(L::Div(y, L::Sub(L::Set(2.0f), L::Abs(y))), this->number[0]);
    }
  };
  template <class L>
  struct Encoder : Flash8Slot::Encoder<L> {
    static BALLAST_FN Encoder Of(typename L::U, typename L::U absmax) {
      return {Flash8Slot::Encoder<L>::Numbers(absmax)};
    }
    template <bool>
    BALLAST_FN typename L::U Encode(typename L::F x, typename L::U) const {
      const auto z = L::Div(x, this->number[0]);
      const auto y = L::Div(L::Mul(L::Set(2.0f), z), L::Add(L::Set(1.0f), L::Abs(z)));
      return FloorOfHalfMore<L>(L::Mul(L::Set(127.0f), y));
    }
  };
  template <class L>
  static BALLAST_FN typename L::M Saturated(typename L::U code) {
    return L::EqualBits(L::MaxBits(code, L::SubBits(L::SetBits(0), code)), L::SetBits(127));
  }
};

struct Flash8NonNegative : Flash8Slot {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1}, {"scale", 2, 32}};
  static constexpr bool kStoresRoot = true;

  template <class L>
  struct Decoder : Flash8Slot::Decoder<L> {
    static BALLAST_FN Decoder Of(typename L::U scale) { return {Flash8Slot::Decoder<L>::Numbers(scale)}; }
    BALLAST_FN typename L::F Decode(typename L::U code) const {
      const auto root = L::Mul(L::Div(L::FromInteger(code), L::Set(255.0f)), this->number[0]);
      return L::Mul(root, root);
    }
  };
  template <class L>
  struct Encoder : Flash8Slot::Encoder<L> {
    static BALLAST_FN Encoder Of(typename L::U, typename L::U absmax) {
      return {Flash8Slot::Encoder<L>::Numbers(absmax)};
    }
    template <bool>
    BALLAST_FN typename L::U Encode(typename L::F root, typename L::U) const {
      return FloorOfHalfMore<L>(L::Mul(L::Set(255.0f), L::Div(root, this->number[0])));
    }
  };
  template <class L>
  static BALLAST_FN typename L::M Saturated(typename L::U code) {
    return L::EqualBits(code, L::SetBits(255));
  }
};

struct Flash8State {
  static constexpr const char* kName = "flash8";
  using Signed = Flash8Signed;
  using NonNegative = Flash8NonNegative;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
