// What the kernels are held against: the definitions written out in double, slow and obvious. Shares nothing with
// kernels/. Formats are described by values, not by bit patterns, wherever that can be done.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ballast::oracle {

struct AdamWHyper {
  double lr = 1e-3, weight_decay = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};
struct AdamWState {
  double weight = 0, m = 0, v = 0;
};
struct AdamWTerms {
  double wanted;    // the change of the weight
  double rms_term;  // g^2 / max(vhat, eps^2)
};

// Loshchilov and Hutter, arXiv 1711.05101, as torch has it: decay is multiplied by lr, eps stands outside the root.
inline AdamWTerms AdamWStep(const AdamWHyper& h, double g, uint64_t t, AdamWState* s) {
  const double steps = static_cast<double>(t);
  s->m = h.beta1 * s->m + (1 - h.beta1) * g;
  s->v = h.beta2 * s->v + (1 - h.beta2) * g * g;
  const double m_hat = s->m / (1 - std::pow(h.beta1, steps));
  const double v_hat = s->v / (1 - std::pow(h.beta2, steps));
  const double wanted = -h.lr * h.weight_decay * s->weight - h.lr * m_hat / (std::sqrt(v_hat) + h.eps);
  s->weight += wanted;
  return {wanted, g * g / std::max(v_hat, h.eps * h.eps)};
}

// Distance between neighbours of a binary format with `mantissa` fraction bits and least normal exponent `least`.
inline double Spacing(double x, int mantissa, int least) {
  const int exponent = x == 0 ? least : std::max(std::ilogb(x), least);
  return std::ldexp(1.0, exponent - mantissa);
}

// To a multiple of the spacing: halves to even, or away from zero.
inline double RoundHalfEven(double x, double spacing) { return std::nearbyint(x / spacing) * spacing; }
inline double RoundHalfAway(double x, double spacing) { return std::round(x / spacing) * spacing; }

// bf16 and fp16 to nearest even; finite values saturate.
inline double ToBf16(double x) {
  const double largest = std::ldexp(255.0, 120);
  return std::clamp(RoundHalfEven(x, Spacing(x, 7, -126)), -largest, largest);
}
inline double ToFp16(double x) { return std::clamp(RoundHalfEven(x, Spacing(x, 10, -14)), -65504.0, 65504.0); }

// The value of a 16-bit float with `mantissa` fraction bits; NaN and infinity are the caller's business.
inline double FromHalf(uint32_t code, int mantissa) {
  const int exponent_bits = 15 - mantissa, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> mantissa & ((1u << exponent_bits) - 1));
  const int fraction = static_cast<int>(code & ((1u << mantissa) - 1));
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                                         : std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
  return (code & 0x8000) != 0 ? -magnitude : magnitude;
}

// split24 (low = 8) and split32 (low = 16) to nearest: the value kept, and the bf16 that is served for it.
struct SplitValue {
  double kept, served;
};
inline SplitValue Split(double x, int low) {
  const double kept = low == 16 ? x : RoundHalfAway(x, Spacing(x, 15, -126));
  const double served = RoundHalfAway(kept, Spacing(kept, 7, -126));
  if (std::abs(served) < std::ldexp(1.0, 128)) return {kept, served};
  // hi is the largest finite bf16, lo the largest correction: half its spacing less one step.
  const double largest = std::ldexp(255.0, 120), half = std::ldexp(1.0, 119), step = std::ldexp(1.0, 127 - 7 - low);
  return {std::copysign(largest + half - step, x), std::copysign(largest, x)};
}

// companded8. A is the stored scale.
inline double MomentumLevel(int code, double scale) { return code / (254.0 - std::abs(code)) * scale; }
inline double VarianceLevel(int code, double scale) {
  const double root = (code == 0 ? 0.5 : code) * scale / 255.0;
  return root * root;
}
inline int MomentumNearest(double m, double scale) {
  if (scale == 0) return 0;
  const double position = 254 * std::abs(m) / (std::abs(m) + scale);
  const int k = std::min(127, static_cast<int>(std::floor(position + 0.5)));
  return m < 0 ? -k : k;
}
inline int VarianceNearest(double v, double scale) {
  if (scale == 0) return 0;
  return std::min(255, static_cast<int>(std::floor(std::sqrt(v) * 255 / scale + 0.5)));
}

}  // namespace ballast::oracle
