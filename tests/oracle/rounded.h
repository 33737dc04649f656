// A number with a bound on what fp32 arithmetic may have made of it: Wilkinson's running error analysis. Whoever
// computes the same formula in fp32, in any order of rounding, is within `error` of `value`.
#pragma once

#include <algorithm>
#include <cmath>

namespace ballast::oracle {

struct Rounded {
  double value = 0;
  double error = 0;
};

inline constexpr double kUnit = 0x1p-24;   // half a unit in the last place of 1
inline constexpr double kTiny = 0x1p-149;  // spacing of subnormals

// One more rounding. An exact zero stays exact.
inline Rounded AfterRounding(double value, double error) {
  if (value == 0 && error == 0) return {};
  return {value, error + kUnit * (std::abs(value) + error) + kTiny};
}
// A constant of the host: exact in double, then rounded to fp32 once.
inline Rounded Constant(double x) {
  return {x, std::abs(static_cast<double>(static_cast<float>(x)) - x) + 0x1p-50 * std::abs(x)};
}
inline Rounded Exact(double x) { return {x, 0}; }

inline Rounded operator+(Rounded a, Rounded b) { return AfterRounding(a.value + b.value, a.error + b.error); }
inline Rounded operator-(Rounded a, Rounded b) { return AfterRounding(a.value - b.value, a.error + b.error); }
inline Rounded operator*(Rounded a, Rounded b) {
  return AfterRounding(a.value * b.value,
                       std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error);
}
inline Rounded operator/(Rounded a, Rounded b) {
  const double quotient = a.value / b.value, least = std::abs(b.value) - b.error;
  return AfterRounding(quotient, (a.error + std::abs(quotient) * b.error) / least);
}
inline Rounded Sqrt(Rounded a) {
  const double root = std::sqrt(a.value), least = std::sqrt(std::max(0.0, a.value - a.error));
  return AfterRounding(root, std::max(root - least, std::sqrt(a.value + a.error) - root));
}
inline Rounded Max(Rounded a, Rounded b) { return {std::max(a.value, b.value), std::max(a.error, b.error)}; }
// -1, 0 or 1; any of them where the sign is in doubt.
inline Rounded Sign(Rounded a) {
  const double sign = a.value > 0 ? 1 : a.value < 0 ? -1 : 0;
  return {sign, a.error == 0 || std::abs(a.value) > a.error ? 0.0 : 2.0};
}

// A sum of fp32 terms by kernels/NUMERICS.md, "The order of sums": `depth` additions lie on the way of a term.
struct RoundedSum {
  double value = 0, error = 0, magnitude = 0;

  void Add(Rounded term) {
    value += term.value;
    error += term.error;
    magnitude += std::abs(term.value) + term.error;
  }
  double Bound() const {
    constexpr double kDepth = 16 + 8;
    return error + kDepth * kUnit * magnitude + kTiny * 4096;
  }
};

}  // namespace ballast::oracle
