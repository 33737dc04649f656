// The master and state formats as values: what is kept of a number, and what a stored code stands for. Slow, obvious,
// in double, from kernels/NUMERICS.md, "Master formats" and "State formats"; shares nothing with kernels/.
#pragma once

#include <string_view>
#include <vector>

#include "tests/oracle/numbers.h"

namespace ballast::oracle {

// How one number is rounded: to nearest, or by 16 random bits.
struct Rounding {
  bool stochastic = false;
  uint32_t bits = 0;
};

// A weight as it is kept, and the bf16 number it is served as.
struct StoredWeight {
  double value, served;
};

// split24 (low = 8) and split32 (low = 16).
inline StoredWeight Split(double x, int low, Rounding rounding) {
  const double spacing = Spacing(x, {15, -126, 0});
  double kept = x;
  if (low == 8) kept = rounding.stochastic ? RoundWithBits(x, kFp32, rounding.bits >> 8, 8) : RoundHalfAway(x, spacing);
  const double served = RoundHalfAway(kept, Spacing(kept, kBf16));
  if (std::abs(served) <= kBf16.largest) return {kept, served};
  // hi is the largest finite bf16, lo the largest correction: half its spacing less one step.
  const double half = std::ldexp(1.0, 119), step = std::ldexp(1.0, 127 - 7 - low);
  return {std::copysign(kBf16.largest + half - step, x), std::copysign(kBf16.largest, x)};
}

// What would round to infinity saturates to the largest fp32 number that does not.
inline double Saturated(double x, const Float& f) {
  const double largest = f.largest + Spacing(f.largest, f) / 2 - Spacing(f.largest, kFp32);
  return std::clamp(x, -largest, largest);
}

// FlashOptim's signed fraction q/N of half the spacing of `narrow`. The formats here take bf16 for it.
struct FlashWeight {
  double narrow, value;
  int q;
};
inline double FlashValue(double narrow, int q, int n, const Float& f) {
  return narrow + q * (Spacing(narrow, f) / 2) / n;
}
inline FlashWeight Flash(double x, int n, const Float& f) {
  x = Saturated(x, f);
  const double narrow = Nearest(x, f), half = Spacing(narrow, f) / 2;
  const float position = static_cast<float>(n * ((x - narrow) / half));  // the published code rounds here
  const int q =
      static_cast<int>(std::clamp(std::round(position), -1.0f * static_cast<float>(n), static_cast<float>(n)));
  return {narrow, FlashValue(narrow, q, n, f), q};
}

// By 16 random bits: of a normal number below its cut, of others in 2^-16 of the subnormals' spacing.
inline double StochasticE5M2(double x, uint32_t bits) {
  if (std::abs(x) >= std::ldexp(1.0, kE5M2.least)) return RoundWithBits(x, kE5M2, bits << 5, 21);
  const double spacing = Spacing(0, kE5M2);
  return std::copysign(std::floor((std::nearbyint(std::abs(x) / spacing * 65536) + bits) / 65536) * spacing, x);
}

inline StoredWeight Store(std::string_view master, double x, Rounding rounding) {
  if (master == "fp32") return {x, Nearest(x, kBf16)};
  if (master == "split24") return Split(x, 8, rounding);
  if (master == "split32") return Split(x, 16, rounding);
  if (master == "bf16") {
    const double kept = rounding.stochastic ? RoundWithBits(x, kBf16, rounding.bits, 16) : Nearest(x, kBf16);
    return {kept, kept};
  }
  if (master == "mcf") {
    const double hi = Nearest(x, kBf16);
    return {hi + Nearest(Saturated(x, kBf16) - hi, kBf16), hi};
  }
  if (master == "mcf8") {
    x = std::clamp(x, -kE4M3.largest - kE5M2.largest, kE4M3.largest + kE5M2.largest);
    const double hi = Nearest(x, kE4M3), rest = x - hi;
    const double kept = hi + (rounding.stochastic ? StochasticE5M2(rest, rounding.bits) : Nearest(rest, kE5M2));
    return {kept, Nearest(kept, kBf16)};
  }
  const FlashWeight w = Flash(x, master == "flash24" ? 127 : 32767, kBf16);
  return {w.value, w.narrow};
}

// What the words of a weight stand for: `hi` a bf16 pattern (fp32 has its own, mcf8 one of e4m3), `lo` the signed, bf16
// or e5m2 second word.
inline double WeightOf(std::string_view master, uint32_t hi, int lo) {
  if (master == "mcf8") return ValueOf(hi, kE4M3, 8) + ValueOf(static_cast<uint32_t>(lo) & 0xff, kE5M2, 8);
  const double narrow = ValueOf(hi, kBf16, 16);
  if (master == "bf16") return narrow;
  if (master == "mcf") return narrow + ValueOf(static_cast<uint32_t>(lo) & 0xffff, kBf16, 16);
  if (master == "flash24") return FlashValue(narrow, lo, 127, kBf16);
  if (master == "flash32") return FlashValue(narrow, lo, 32767, kBf16);
  // split: the words are one integer, hi above and lo added below, that is the upper part of an fp32 pattern.
  const int low = master == "split24" ? 8 : 16;
  const uint32_t magnitude = static_cast<uint32_t>(static_cast<int>((hi & 0x7fff) << low) + lo) << (16 - low);
  return std::copysign(MagnitudeOf(magnitude, kFp32), narrow);
}

// The moments. A moment with scales keeps a code for each element and a scale for each block; others keep a number.
enum class Moment { kFirst, kSecond };

// What a block's codes are relative to: its largest magnitude, or that as it is stored.
struct BlockScale {
  double absmax, stored;
};
struct FormatOfMoment {
  int block;     // elements that share a scale; 0: no scales
  bool of_root;  // codes are of sqrt(v)
  int largest;   // code
  // From the largest magnitude of what is encoded (the root, where of_root).
  double (*scale)(double absmax);
  double (*level)(int code, double scale);  // of v itself, also where of_root
  // The code of x, or of its root where of_root.
  int (*code)(double x, BlockScale scale, Rounding rounding);
};

inline double Uniform(Rounding rounding) { return (rounding.bits + 0.5) / 65536; }
// Between neighbouring levels a <= x < b, b with probability (x-a)/(b-a).
inline bool TakesUpper(double x, double a, double b, Rounding rounding) { return Uniform(rounding) * (b - a) < x - a; }
inline int Signed(int k, double x) { return x < 0 ? -k : k; }

namespace companded8 {
inline double Scale(double absmax) {
  const double spacing = Spacing(absmax, kBf16);
  return std::ceil(absmax / spacing) * spacing;
}
inline double FirstLevel(int code, double scale) { return code / (254.0 - std::abs(code)) * scale; }
inline double SecondLevel(int code, double scale) {
  const double root = (code == 0 ? 0.5 : code) * scale / 255;
  return root * root;
}
inline int FirstCode(double x, BlockScale block, Rounding rounding) {
  const double scale = block.stored, a = std::abs(x);
  if (scale == 0) return 0;
  const double position = 254 * a / (a + scale);
  int k = std::min(127, static_cast<int>(std::floor(position)));
  if (rounding.stochastic) {
    // By the random number, ascending: of a positive x first the lower level, then the upper; of a negative one the
    // upper in magnitude, then the lower.
    const double below = FirstLevel(k, scale), share = (a - below) / (FirstLevel(k + 1, scale) - below);
    const double u = rounding.bits / 65536.0;
    k += k < 127 && (x < 0 ? u < share : u >= 1 - share) ? 1 : 0;
  } else {
    k += x < 0 ? position - k > 0.5 : position - k >= 0.5;
  }
  return Signed(std::min(k, 127), x);
}
inline int SecondCode(double root, BlockScale block, Rounding rounding) {
  const double scale = block.stored;
  if (scale == 0) return 0;
  const double position = root * 255 / scale;
  int k = std::min(255, static_cast<int>(std::floor(position)));
  if (rounding.stochastic) {
    k += k < 255 && TakesUpper(root * root, SecondLevel(k, scale), SecondLevel(k + 1, scale), rounding) ? 1 : 0;
  } else {
    k += position - k >= 0.5 ? 1 : 0;
  }
  return std::min(k, 255);
}
}  // namespace companded8

namespace flash8 {
inline double Divisor(double absmax) { return std::max(absmax, 1e-12); }
inline double Scale(double absmax) { return Nearest(Divisor(absmax), kFp16); }
inline double FirstLevel(int code, double scale) {
  const double y = code / 127.0;
  return y / (2 - std::abs(y)) * scale;
}
inline double SecondLevel(int code, double scale) { return code / 255.0 * scale * (code / 255.0 * scale); }
inline int FirstCode(double x, BlockScale block, Rounding) {
  const double z = x / Divisor(block.absmax), y = 2 * z / (1 + std::abs(z));
  return static_cast<int>(std::floor(127 * y + 0.5));
}
inline int SecondCode(double root, BlockScale block, Rounding) {
  return static_cast<int>(std::floor(255 * root / Divisor(block.absmax) + 0.5));
}
}  // namespace flash8

// bitsandbytes' dynamic map: seven decades, each split evenly; a code is an index into the sorted map.
namespace dynamic8 {
inline std::vector<double> Map(bool with_sign) {
  std::vector<double> map = {0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int count = with_sign ? 1 << decade : 2 << decade;
    for (int i = 0; i < count; ++i) {
      const double middle = 0.1 + 0.9 * (i + 0.5) / count;
      const double value = std::pow(10.0, decade - 6) * middle;
      map.push_back(value);
      if (with_sign) map.push_back(-value);
    }
  }
  std::sort(map.begin(), map.end());
  return map;
}
inline const std::vector<double>& FirstMap() {
  static const std::vector<double> kMap = Map(true);
  return kMap;
}
inline const std::vector<double>& SecondMap() {
  static const std::vector<double> kMap = Map(false);
  return kMap;
}
inline double Scale(double absmax) { return absmax; }
inline double FirstLevel(int code, double scale) { return FirstMap()[static_cast<size_t>(code)] * scale; }
inline double SecondLevel(int code, double scale) { return SecondMap()[static_cast<size_t>(code)] * scale; }
inline int NearestIn(const std::vector<double>& map, double x) {
  const auto above = std::lower_bound(map.begin(), map.end(), x);
  if (above == map.end()) return static_cast<int>(map.size()) - 1;
  if (above == map.begin()) return 0;
  return static_cast<int>(above - map.begin()) - (x - above[-1] <= above[0] - x ? 1 : 0);
}
inline int FirstCode(double x, BlockScale block, Rounding) {
  return NearestIn(FirstMap(), block.absmax == 0 ? 0 : x / block.absmax);
}
inline int SecondCode(double v, BlockScale block, Rounding) {
  return NearestIn(SecondMap(), block.absmax == 0 ? 0 : v / block.absmax);
}
}  // namespace dynamic8

// What an unscaled format keeps of a moment.
inline double Kept(std::string_view state, double x, Rounding rounding) {
  if (state == "fp32") return x;
  return rounding.stochastic && state == "bf16" ? RoundWithBits(x, kBf16, rounding.bits, 16) : Nearest(x, kBf16);
}

inline FormatOfMoment FormatOf(std::string_view state, Moment moment) {
  const bool first = moment == Moment::kFirst;
  if (state == "companded8") {
    if (first) return {32, false, 127, companded8::Scale, companded8::FirstLevel, companded8::FirstCode};
    return {32, true, 255, companded8::Scale, companded8::SecondLevel, companded8::SecondCode};
  }
  if (state == "flash8") {
    if (first) return {32, false, 127, flash8::Scale, flash8::FirstLevel, flash8::FirstCode};
    return {32, true, 255, flash8::Scale, flash8::SecondLevel, flash8::SecondCode};
  }
  if (state == "dynamic8") {
    if (first) return {256, false, 255, dynamic8::Scale, dynamic8::FirstLevel, dynamic8::FirstCode};
    return {256, false, 255, dynamic8::Scale, dynamic8::SecondLevel, dynamic8::SecondCode};
  }
  return {};
}

}  // namespace ballast::oracle
