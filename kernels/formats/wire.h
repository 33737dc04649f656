// Payload formats: how gradients come in and weights go out. Each is kName, kBytes, Decode(word) and Encode(x), which
// rounds to nearest even; a finite value beyond the largest finite one saturates to it, so that serving a weight makes
// no infinity.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/lanes/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct WireFp32 {
  static constexpr const char* kName = "fp32";
  using Word = uint32_t;
  static BALLAST_FN float Decode(Word w) { return std::bit_cast<float>(w); }
  static BALLAST_FN Word Encode(float x) { return std::bit_cast<uint32_t>(x); }
};

struct WireBf16 {
  static constexpr const char* kName = "bf16";
  using Word = uint16_t;
  static BALLAST_FN float Decode(Word w) { return std::bit_cast<float>(uint32_t{w} << 16); }
  static BALLAST_FN Word Encode(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Word>((bits >> 16) | 0x40);  // stays NaN
    if ((bits & 0x7fffffffu) == 0x7f800000u) return static_cast<Word>(bits >> 16);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return static_cast<Word>((rounded & 0x7fff) == 0x7f80 ? rounded - 1 : rounded);
  }
};

struct WireFp16 {
  static constexpr const char* kName = "fp16";
  using Word = uint16_t;
  static BALLAST_FN float Decode(Word w) {
    const uint32_t sign = uint32_t{w & 0x8000u} << 16, exponent = (w >> 10) & 31u, mantissa = w & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24f
                                          : std::bit_cast<float>(((exponent + 112) << 23) | (mantissa << 13));
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  static BALLAST_FN Word Encode(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<Word>(sign | 0x7e00u);
    if (magnitude == 0x7f800000u) return static_cast<Word>(sign | 0x7c00u);
    if (magnitude >= 0x477ff000u) return static_cast<Word>(sign | 0x7bffu);  // 65520 and more: the largest finite
    if (magnitude < 0x38800000u) {                                           // below 2^-14: subnormal, spacing 2^-24
      // Adding 2^-1 leaves the value rounded to multiples of 2^-24 in the low mantissa bits.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<Word>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
    return static_cast<Word>(sign | ((rounded >> 13) - (112u << 10)));
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
