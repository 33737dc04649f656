// Adam (Kingma and Ba, arXiv 1412.6980) and AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch's: bias
// correction folded into host constants. Each operation is one fp32 rounding:
//
//   Adam: g = fma(wd, x, g) first, and d = 1
//   m = RN(RN(b1 m) + RN(c1 g));  v = RN(RN(b2 v) + RN(c2 RN(g g)));  s = sqrt(v)
//   u = RN(m / fma(s, q2, eps));  x = fma(-a, u, RN(x d))
//   with c = 1 - b, q2 = 1/sqrt(1 - b2^t), a = lr/(1 - b1^t), d = 1 - lr wd, or 1 - wd lr/lr_peak
//
// The wanted update of the statistics is fma(-a, u, RN((d - 1) x)); vhat = v/(1 - b2^t).
#pragma once

#include <algorithm>

#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <bool kDecoupled>
struct AdamRule {
  static constexpr Moment kMoments[] = {Moment::kSigned, Moment::kNonNegative};
  static constexpr bool kHasRms = true;
  static constexpr bool kTwoPass = false;

  enum Constant { kB1, kC1, kB2, kC2, kQ2, kEps, kMinusA, kD, kDecay, kL2, kDebias, kEps2, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t t, float* constants) {
    const double lr = hyper[0], decay = hyper[1], b1 = hyper[2], b2 = hyper[3], eps = hyper[4];
    const double debias1 = 1 - Power(b1, t), debias2 = 1 - Power(b2, t);
    const double taken = kDecoupled ? DecoupledDecay(lr, decay, hyper[5]) : 0;
    const double values[kConstants] = {b1,          1 - b1,        b2,        1 - b2, 1 / std::sqrt(debias2),
                                       eps,         -lr / debias1, 1 - taken, -taken, decay,
                                       1 / debias2, eps * eps};
    for (int i = 0; i < kConstants; ++i) constants[i] = static_cast<float>(values[i]);
    constants[kEps] = AtLeastLeastNormal(eps);
    constants[kEps2] = AtLeastLeastNormal(eps * eps);
  }

  static Preconditioner Precondition(std::span<const double> hyper, uint64_t t) {
    return {static_cast<float>(1 / (1 - Power(hyper[2], t))), static_cast<float>(1 / std::sqrt(1 - Power(hyper[3], t))),
            AtLeastLeastNormal(hyper[4])};
  }

  template <class V>
  static BALLAST_FN Updated<V> Apply(const typename V::F* k, const Element<V>& e) {
    auto g = e.grad;
    if constexpr (!kDecoupled) g = V::Fma(k[kL2], e.weight, g);
    const auto m = V::Add(V::Mul(k[kB1], e.moment[0]), V::Mul(k[kC1], g));
    const auto v = V::Add(V::Mul(k[kB2], e.moment[1]), V::Mul(k[kC2], V::Mul(g, g)));
    const auto s = V::Sqrt(v);
    const auto u = V::Div(m, V::Fma(s, k[kQ2], k[kEps]));
    Updated<V> r;
    TakeStep<V, kDecoupled>(k[kMinusA], u, e.weight, k[kD], k[kDecay], &r);
    r.moment[0] = m;
    r.moment[1] = v;
    r.root[1] = s;
    r.rms_term = V::Div(V::Mul(e.grad, e.grad), V::Max(V::Mul(v, k[kDebias]), k[kEps2]));
    return r;
  }
};

struct Adam : AdamRule<false> {
  static constexpr const char* kName = "adam";
  static constexpr Hyper kHypers[] = {HyperLr(1e-3), HyperL2Decay(), HyperBeta1(0.9), HyperBeta2(0.999),
                                      HyperEps(1e-8)};
};

struct AdamW : AdamRule<true> {
  static constexpr const char* kName = "adamw";
  static constexpr Hyper kHypers[] = {HyperLr(1e-3),     HyperDecay(1e-2), HyperBeta1(0.9),
                                      HyperBeta2(0.999), HyperEps(1e-8),   HyperLrPeak()};
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
