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
  template <class L>
  static BALLAST_FN typename L::F Decode(typename L::U word) {
    return L::FromBits(word);
  }
  template <class L>
  static BALLAST_FN typename L::U Encode(typename L::F x, typename L::F) {
    return L::Bits(x);
  }
};

struct WireBf16 : WireWord {
  static constexpr const char* kName = "bf16";
  static constexpr int kBytes = 2;
  static constexpr bool kGradient = true, kServing = true;
  template <class L>
  static BALLAST_FN typename L::F Decode(typename L::U word) {
    return FromBf16<L>(word);
  }
  template <class L>
  static BALLAST_FN typename L::U Encode(typename L::F x, typename L::F) {
    const auto bits = L::Bits(x);
    const auto magnitude = L::And(bits, L::SetBits(kMagnitude));
    const auto upper = L::template ShiftRight<16>(bits);
    const auto special = L::SelectBits(L::GreaterBits(magnitude, L::SetBits(kInfinityBits)),
                                       L::Or(upper, L::SetBits(0x40)), upper);  // a NaN stays one
    const auto finite = L::GreaterBits(L::SetBits(kInfinityBits), magnitude);
    const auto word = NearestBf16Word<L>(x), largest = L::SetBits(0x7f7f);
    const auto sign = L::And(word, L::SetBits(0x8000));
    const auto saturated = L::Or(sign, L::MinBits(L::And(word, L::SetBits(0x7fff)), largest));
    return L::SelectBits(finite, saturated, special);
  }
};

// A float of a word or less, as it is.
template <class Float, int kWidth>
struct WireSmall : WireWord {
  static constexpr int kBytes = kWidth;
  template <class L>
  static BALLAST_FN typename L::F Decode(typename L::U word) {
    return Float::template Decode<L>(word);
  }
  template <class L>
  static BALLAST_FN typename L::U Encode(typename L::F x, typename L::F) {
    return Float::template Encode<L>(x);
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
  template <class L>
  static BALLAST_FN typename L::U Encode(typename L::F x, typename L::F scale) {
    const auto q = L::Div(L::Mul(L::Set(127.0f), x), scale);
    const auto bounded = L::Max(L::Min(q, L::Set(127.0f)), L::Set(-127.0f));
    const auto anchor = L::Set(0x1.8p23f);  // leaves the nearest integer, halves to even, in the low mantissa bits
    const auto code = L::SubBits(L::Bits(L::Add(bounded, anchor)), L::Bits(anchor));
    return L::SelectBits(L::EqualBits(L::Bits(scale), L::SetBits(0)), L::SetBits(0), code);
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
