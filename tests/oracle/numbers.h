// Binary floating-point formats, described by their values: what is representable, and to what a number rounds. Shares
// nothing with kernels/.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ballast::oracle {

struct Float {
  int mantissa;    // fraction bits
  int least;       // exponent of the smallest normal number
  double largest;  // finite
};
inline constexpr Float kFp32 = {23, -126, 0x1.fffffep127};
inline constexpr Float kBf16 = {7, -126, 0x1.fep127};
inline constexpr Float kFp16 = {10, -14, 65504};
inline constexpr Float kE5M2 = {2, -14, 57344};  // OCP 8-bit
inline constexpr Float kE4M3 = {3, -6, 448};     // OCP 8-bit: no infinity, one NaN

// Distance between neighbours at x.
inline double Spacing(double x, const Float& f) {
  const int exponent = x == 0 ? f.least : std::max(std::ilogb(x), f.least);
  return std::ldexp(1.0, exponent - f.mantissa);
}

// To a multiple of the spacing: halves to even, or away from zero.
inline double RoundHalfEven(double x, double spacing) { return std::nearbyint(x / spacing) * spacing; }
inline double RoundHalfAway(double x, double spacing) { return std::round(x / spacing) * spacing; }

// To nearest even; finite values saturate.
inline double Nearest(double x, const Float& f) {
  return std::clamp(RoundHalfEven(x, Spacing(x, f)), -f.largest, f.largest);
}

// Upwards in magnitude with probability (what is cut off) / spacing: `bits` of `count` random bits are added below the
// cut, to a number with fp32's digits.
inline double RoundWithBits(double x, const Float& f, uint32_t bits, int count) {
  const double least = Spacing(x, kFp32), spacing = std::ldexp(least, count);
  const double magnitude = std::floor((std::abs(x) + bits * least) / spacing) * spacing;
  return std::copysign(std::min(magnitude, f.largest), x);
}

// The value of a code without its sign bit; infinities and NaN are the caller's business.
inline double MagnitudeOf(uint32_t code, const Float& f) {
  const int exponent = static_cast<int>(code >> f.mantissa);
  const int fraction = static_cast<int>(code & ((1u << f.mantissa) - 1));
  return exponent == 0 ? std::ldexp(fraction, f.least - f.mantissa)
                       : std::ldexp(fraction + (1 << f.mantissa), exponent - 1 + f.least - f.mantissa);
}
inline double ValueOf(uint32_t code, const Float& f, int bits) {
  const uint32_t sign = 1u << (bits - 1);
  const double magnitude = MagnitudeOf(code & (sign - 1), f);
  return (code & sign) != 0 ? -magnitude : magnitude;
}

// The code of a value that the format has.
inline uint32_t CodeOf(double x, const Float& f, int bits) {
  const uint32_t sign = std::signbit(x) ? 1u << (bits - 1) : 0;
  if (x == 0) return sign;
  const int exponent = std::max(std::ilogb(x), f.least);
  const uint32_t fraction = static_cast<uint32_t>(std::ldexp(std::abs(x), f.mantissa - exponent));
  return sign | ((static_cast<uint32_t>(exponent - f.least) << f.mantissa) + fraction);
}

// int8 with a scale, as SwitchBack serves a row or a tensor.
inline int Int8Of(double w, double scale) { return scale == 0 ? 0 : static_cast<int>(std::nearbyint(127 * w / scale)); }

}  // namespace ballast::oracle
