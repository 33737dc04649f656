// Payload formats: how gradients come in and weights go out. Each is kName, kBytes, what it is fit for, Decode(word)
// and Encode(x, scale). Encoding rounds to nearest even; a finite value beyond the largest finite one saturates to it.
//
// Formats with scales serve weights: int8 as in SwitchBack (arXiv 2304.13013), q = rint(127 w / s) with s the largest
// magnitude of the row or tensor, and all codes 0 where s is 0.
#pragma once

#include "kernels/formats/bf16.h"
#include "kernels/formats/small_float.h"
#include "kernels/registry.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// Codes of most formats are plain words; kSigned: integers.
struct WireWord {
  static constexpr bool kSigned = false;
  static constexpr Scaling kScaling = Scaling::kNone;
};

struct WireFp32 : WireWord {
  static constexpr const char* kName = "fp32";
  static constexpr int kBytes = 4;
  static constexpr bool kGradient = true, kServing = true;
  template <class V>
  static BALLAST_FN typename V::F Decode(typename V::U word) {
    return V::FromBits(word);
  }
  template <class V>
  static BALLAST_FN typename V::U Encode(typename V::F x, typename V::F) {
    return V::Bits(x);
  }
};

struct WireBf16 : WireWord {
  static constexpr const char* kName = "bf16";
  static constexpr int kBytes = 2;
  static constexpr bool kGradient = true, kServing = true;
  template <class V>
  static BALLAST_FN typename V::F Decode(typename V::U word) {
    return FromBf16<V>(word);
  }
  template <class V>
  static BALLAST_FN typename V::U Encode(typename V::F x, typename V::F) {
    const auto bits = V::Bits(x);
    const auto magnitude = V::And(bits, V::SetBits(kMagnitude));
    const auto upper = V::template ShiftRight<16>(bits);
    const auto special = V::SelectBits(V::GreaterBits(magnitude, V::SetBits(kInfinityBits)),
                                       V::Or(upper, V::SetBits(0x40)), upper);  // a NaN stays one
    const auto finite = V::GreaterBits(V::SetBits(kInfinityBits), magnitude);
    const auto word = NearestBf16Word<V>(x), largest = V::SetBits(0x7f7f);
    const auto sign = V::And(word, V::SetBits(0x8000));
    const auto saturated = V::Or(sign, V::MinBits(V::And(word, V::SetBits(0x7fff)), largest));
    return V::SelectBits(finite, saturated, special);
  }
};

// A float of a word or less, as it is.
template <class Float, int kWidth>
struct WireSmall : WireWord {
  static constexpr int kBytes = kWidth;
  template <class V>
  static BALLAST_FN typename V::F Decode(typename V::U word) {
    return Float::template Decode<V>(word);
  }
  template <class V>
  static BALLAST_FN typename V::U Encode(typename V::F x, typename V::F) {
    return Float::template Encode<V>(x);
  }
};
struct WireFp16 : WireSmall<Fp16, 2> {
  static constexpr const char* kName = "fp16";
  static constexpr bool kGradient = true, kServing = true;
};
// More range than precision: gradients. More precision than range: weights, which unit scaling keeps near 1.
struct WireFp8E5M2 : WireSmall<Fp8E5M2, 1> {
  static constexpr const char* kName = "fp8-e5m2";
  static constexpr bool kGradient = true, kServing = false;
};
struct WireFp8E4M3 : WireSmall<Fp8E4M3, 1> {
  static constexpr const char* kName = "fp8-e4m3";
  static constexpr bool kGradient = false, kServing = true;
};

// Codes are bytes in two's complement; a weight is code * s / 127.
template <Scaling kPer>
struct WireInt8 {
  static constexpr int kBytes = 1;
  static constexpr bool kSigned = true, kGradient = false, kServing = true;
  static constexpr Scaling kScaling = kPer;
  template <class V>
  static BALLAST_FN typename V::U Encode(typename V::F x, typename V::F scale) {
    const auto q = V::Div(V::Mul(V::Set(127.0f), x), scale);
    const auto bounded = V::Max(V::Min(q, V::Set(127.0f)), V::Set(-127.0f));
    const auto anchor = V::Set(0x1.8p23f);  // leaves the nearest integer, halves to even, in the low mantissa bits
    const auto code = V::SubBits(V::Bits(V::Add(bounded, anchor)), V::Bits(anchor));
    return V::SelectBits(V::EqualBits(V::Bits(scale), V::SetBits(0)), V::SetBits(0), code);
  }
};
struct WireInt8Row : WireInt8<Scaling::kRow> {
  static constexpr const char* kName = "int8-row";
};
struct WireInt8Tensor : WireInt8<Scaling::kTensor> {
  static constexpr const char* kName = "int8-tensor";
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
