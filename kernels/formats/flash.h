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
template <class V>
BALLAST_FN typename V::U RoundHalfAway(typename V::F y) {
  const auto magnitude = V::Abs(y);
  const auto k = V::Truncate(magnitude);
  const auto up = V::LessEqual(V::Set(0.5f), V::Sub(magnitude, V::FromInteger(k)));
  const auto sign = V::template ShiftRightSigned<31>(V::Bits(y));
  return V::SubBits(V::Xor(V::IncrementIf(up, k), sign), sign);
}

// floor(y + .5) with the sum rounded, as a signed integer.
template <class V>
BALLAST_FN typename V::U FloorOfHalfMore(typename V::F y) {
  const auto sum = V::Add(y, V::Set(0.5f));
  const auto k = V::Truncate(sum);
  const auto below = V::Less(sum, V::FromInteger(k));  // k was rounded up, towards zero
  return V::SubBits(k, V::SelectBits(below, V::SetBits(1), V::SetBits(0)));
}

template <int N>
struct Flash {
  static constexpr bool kPaired = false;
  static constexpr bool kManyRegisters = true;
  static constexpr uint32_t kSaturated = kSaturatedBf16;

  // Two powers of two whose product is h = 2^(E-8), of the biased exponent e >= 1 of n; or of 1/h.
  template <class V>
  struct TwoSteps {
    typename V::F first, second;
  };
  template <class V>
  static BALLAST_FN typename V::U BiasedExponent(typename V::U word) {
    const auto e = V::And(V::template ShiftRight<7>(word), V::SetBits(0xff));
    return V::MaxBits(e, V::SetBits(1));
  }
  template <class V>
  static BALLAST_FN TwoSteps<V> PowerOfTwo(typename V::U exponent) {  // signed, -300 < exponent < 300
    const auto half = V::template ShiftRightSigned<1>(exponent);
    const auto rest = V::SubBits(exponent, half);
    const auto power = [](typename V::U p) {
      return V::FromBits(V::template ShiftLeft<23>(V::AddBits(p, V::SetBits(127))));
    };
    return {power(half), power(rest)};
  }

  template <class V>
  static BALLAST_FN typename V::F Decode(const Words<V>& w) {
    const auto n = FromBf16<V>(w.word[0]);
    const auto h = PowerOfTwo<V>(V::SubBits(BiasedExponent<V>(w.word[0]), V::SetBits(127 + 8)));
    const auto fraction = V::Div(V::FromInteger(w.word[1]), V::Set(static_cast<float>(N)));
    return V::Add(n, V::Mul(V::Mul(fraction, h.first), h.second));
  }

  template <class V, bool>
  static BALLAST_FN Words<V> Encode(typename V::F x, typename V::U) {
    const auto word = NearestBf16Word<V>(x);
    const auto residual = V::Sub(x, FromBf16<V>(word));
    const auto inverse = PowerOfTwo<V>(V::SubBits(V::SetBits(127 + 8), BiasedExponent<V>(word)));
    const auto scaled = V::Mul(V::Mul(residual, inverse.first), inverse.second);
    return {{word, RoundHalfAway<V>(V::Mul(V::Set(static_cast<float>(N)), scaled))}};
  }
};

struct Flash24 : Flash<127> {
  static constexpr const char* kName = "flash24";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 1, 1, true, 0}};
};

struct Flash32 : Flash<32767> {
  static constexpr const char* kName = "flash32";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 2, 1, true, 0}};
};

struct Flash8Moment {
  static constexpr uint32_t kScalePer = 32;
  static constexpr uint32_t kLargestBits = 0x477fefffu;  // below 65520, which fp16 rounds to infinity

  template <class V>
  static BALLAST_FN typename V::U Scale(typename V::U absmax) {
    return Fp16::Encode<V>(Divisor<V>(absmax));
  }
  template <class V>
  static BALLAST_FN typename V::F Divisor(typename V::U absmax) {
    return V::Max(V::FromBits(absmax), V::Set(1e-12f));
  }

  template <class V>
  struct Decoder {
    static constexpr int kNumbers = 1;
    typename V::F number[1];  // fp16(A)
    static BALLAST_FN auto Numbers(typename V::U scale) { return Decoder{{Fp16::Decode<V>(scale)}}; }
  };
  template <class V>
  struct Encoder {
    static constexpr int kNumbers = 1;
    typename V::F number[1];  // A
    static BALLAST_FN auto Numbers(typename V::U absmax) { return Encoder{{Divisor<V>(absmax)}}; }
  };
};

struct Flash8Signed : Flash8Moment {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1, true, 0}, {"scale", 2, 32}};
  static constexpr bool kStoresRoot = false;

  template <class V>
  struct Decoder : Flash8Moment::Decoder<V> {
    static BALLAST_FN Decoder Of(typename V::U scale) { return {Flash8Moment::Decoder<V>::Numbers(scale)}; }
    BALLAST_FN typename V::F Decode(typename V::U code) const {
      const auto y = V::Div(V::FromInteger(code), V::Set(127.0f));
      return V::Mul(V::Div(y, V::Sub(V::Set(2.0f), V::Abs(y))), this->number[0]);
    }
  };
  template <class V>
  struct Encoder : Flash8Moment::Encoder<V> {
    static BALLAST_FN Encoder Of(typename V::U, typename V::U absmax) {
      return {Flash8Moment::Encoder<V>::Numbers(absmax)};
    }
    template <bool>
    BALLAST_FN typename V::U Encode(typename V::F x, typename V::U) const {
      const auto z = V::Div(x, this->number[0]);
      const auto y = V::Div(V::Mul(V::Set(2.0f), z), V::Add(V::Set(1.0f), V::Abs(z)));
      return FloorOfHalfMore<V>(V::Mul(V::Set(127.0f), y));
    }
  };
  template <class V>
  static BALLAST_FN typename V::M Saturated(typename V::U code) {
    return V::EqualBits(V::MaxBits(code, V::SubBits(V::SetBits(0), code)), V::SetBits(127));
  }
};

struct Flash8NonNegative : Flash8Moment {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1}, {"scale", 2, 32}};
  static constexpr bool kStoresRoot = true;

  template <class V>
  struct Decoder : Flash8Moment::Decoder<V> {
    static BALLAST_FN Decoder Of(typename V::U scale) { return {Flash8Moment::Decoder<V>::Numbers(scale)}; }
    BALLAST_FN typename V::F Decode(typename V::U code) const {
      const auto root = V::Mul(V::Div(V::FromInteger(code), V::Set(255.0f)), this->number[0]);
      return V::Mul(root, root);
    }
  };
  template <class V>
  struct Encoder : Flash8Moment::Encoder<V> {
    static BALLAST_FN Encoder Of(typename V::U, typename V::U absmax) {
      return {Flash8Moment::Encoder<V>::Numbers(absmax)};
    }
    template <bool>
    BALLAST_FN typename V::U Encode(typename V::F root, typename V::U) const {
      return FloorOfHalfMore<V>(V::Mul(V::Set(255.0f), V::Div(root, this->number[0])));
    }
  };
  template <class V>
  static BALLAST_FN typename V::M Saturated(typename V::U code) {
    return V::EqualBits(code, V::SetBits(255));
  }
};

struct Flash8State {
  static constexpr const char* kName = "flash8";
  using Signed = Flash8Signed;
  using NonNegative = Flash8NonNegative;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
