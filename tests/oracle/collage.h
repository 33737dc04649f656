// Collage (arXiv 2405.03637) in bf16, one rounding an operation: each is done in double, which holds it well enough
// that rounding the result to bf16 is the only rounding. Order of operations: head of kernels/rules/collage.h. Shares
// nothing with kernels/.
#pragma once

#include <algorithm>

#include "tests/oracle/numbers.h"
#include "tests/oracle/rules.h"

namespace ballast::oracle {

inline double R(double x) { return RoundHalfEven(x, Spacing(x, kBf16)); }

// A number of two components, |lo| <= half the spacing of hi.
struct Expansion {
  double hi = 0, lo = 0;
};

inline Expansion ExpansionOf(double x) { return {R(x), R(x - R(x))}; }

// a + b exactly, for |a| >= |b|.
inline Expansion Fast2Sum(double a, double b) {
  const double s = R(a + b);
  return {s, R(b - R(s - a))};
}
inline Expansion Grow(Expansion x, double d) {
  const double s = R(x.hi + d);
  const double lo = R(x.lo + R(d - R(s - x.hi)));
  const double hi = R(s + lo);
  return {hi, R(lo - R(hi - s))};
}
inline Expansion Mul(Expansion x, Expansion b) {
  const double p = R(x.hi * b.hi);
  const double e = R(x.hi * b.hi - p);  // the product has 16 digits, so this is one rounding, as in fma
  const double t = R(R(R(x.lo * b.hi) + R(x.hi * b.lo)) + e);
  const double hi = R(p + t);
  return {hi, R(t - R(hi - p))};
}

struct CollageElement {
  Expansion weight;
  double m = 0;
  Expansion v;  // light: lo is 0
};
struct CollageStepped {
  CollageElement after;
  double wanted;
  Rounded rms_term;
};

inline CollageStepped CollageStep(bool plus, const Hypers& h, double gradient, uint64_t t, const CollageElement& e) {
  const double g = R(gradient), eps = std::max(R(h.eps), 0x1p-126);
  const double k1 = R(1 - Power(h.beta1, t)), k2 = R(1 - Power(h.beta2, t));
  CollageElement a;
  a.m = R(R(R(h.beta1) * e.m) + R(R(1 - h.beta1) * g));
  const double w = R(R(1 - h.beta2) * R(g * g));
  if (plus) {
    a.v = Grow(Mul(e.v, ExpansionOf(h.beta2)), w);
    a.v.hi = std::max(a.v.hi, 0.0);
  } else {
    a.v = {R(R(R(h.beta2) * e.v.hi) + w), 0};
  }
  const double v_hat = R(a.v.hi / k2);
  const double u = R(R(a.m / k1) / R(R(std::sqrt(v_hat)) + eps));
  const double d = R(R(-h.lr) * R(u + R(R(h.weight_decay) * e.weight.hi)));
  a.weight = Grow(e.weight, d);
  return {a, d, RmsTerm(Exact(gradient), Exact(v_hat), h.eps)};
}

}  // namespace ballast::oracle
