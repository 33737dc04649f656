// StableAdamW (Wortsman et al., arXiv 2304.13013): AdamW whose learning rate is divided, tensor by tensor, by the root
// mean square of the update that the gradient alone would ask for, when that is above 1. Two passes over a tensor:
//
//   bh = b (1 - b^(t-1)) / (1 - b^t), 0 at t = 1: m and v are debiased as they stand
//   m = fma(bh1, m, RN(c1 g));  v = fma(bh2, v, RN(c2 RN(g g)));  s = sqrt(v)
//   first pass:  RMS = sqrt(mean of RN(RN(g g) / max(v, eps^2))); a block whose g is not finite or whose v cannot be
//                stored adds 0
//   lr_t = lr / max(1, RMS), from lr as fp32;  e = -lr_t wd, or -wd lr_t/lr_peak
//   second pass: u = RN(m / RN(s + eps));  d = fma(-lr_t, u, RN(x e));  x = RN(x + d)
#pragma once

#include <algorithm>

#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct StableAdamW {
  static constexpr const char* kName = "stable_adamw";
  static constexpr Hyper kHypers[] = {HyperLr(1e-3),    HyperDecay(1e-2), HyperBeta1(0.9),
                                      HyperBeta2(0.99), HyperEps(1e-6),   HyperLrPeak()};
  static constexpr Moment kMoments[] = {Moment::kSigned, Moment::kNonNegative};
  static constexpr bool kHasRms = true;
  static constexpr bool kTwoPass = true;
  static constexpr bool kInHalves = false;

  enum Constant { kB1, kC1, kB2, kC2, kEps, kEps2, kLr, kDecayOfLr, kMinusLr, kMinusDecay, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t t, float* constants) {
    const double lr = hyper[0], decay = hyper[1], eps = hyper[4], lr_peak = hyper[5];
    const auto debiased = [t](double b) { return b * (1 - Power(b, t - 1)) / (1 - Power(b, t)); };
    const double b1 = debiased(hyper[2]), b2 = debiased(hyper[3]);
    const double values[] = {b1, 1 - b1, b2, 1 - b2, eps, eps * eps, lr, lr_peak > 0 ? decay / lr_peak : decay};
    std::transform(std::begin(values), std::end(values), constants, [](double x) { return static_cast<float>(x); });
    constants[kEps] = AtLeastLeastNormal(eps);
    constants[kEps2] = AtLeastLeastNormal(eps * eps);
    Finish(0, 1, constants);
  }

  static BALLAST_FN void Finish(double sum, uint64_t n, float* constants) {
    const double rms = std::sqrt(sum / static_cast<double>(n));
    const double lr = static_cast<double>(constants[kLr]) / (rms > 1 ? rms : 1.0);
    const double taken = lr * static_cast<double>(constants[kDecayOfLr]);
    constants[kMinusLr] = static_cast<float>(-lr);
    constants[kMinusDecay] = static_cast<float>(-taken);
  }

  static Preconditioner Precondition(std::span<const double> hyper, uint64_t) {
    return {1, 1, AtLeastLeastNormal(hyper[4])};
  }

  template <class V>
  static BALLAST_FN typename V::F SecondMoment(const typename V::F* k, typename V::F v, typename V::F g2) {
    return V::Fma(k[kB2], v, V::Mul(k[kC2], g2));
  }
  // What the first pass adds, and the second moment.
  template <class V>
  struct Measured {
    typename V::F term, v;
  };
  template <class V>
  static BALLAST_FN Measured<V> Measure(const typename V::F* k, typename V::F g, typename V::F old_v) {
    const auto g2 = V::Mul(g, g);
    const auto v = SecondMoment<V>(k, old_v, g2);
    return {V::Div(g2, V::Max(v, k[kEps2])), v};
  }

  template <class V>
  static BALLAST_FN Updated<V> Apply(const typename V::F* k, const Element<V>& e) {
    const auto g2 = V::Mul(e.grad, e.grad);
    const auto m = V::Fma(k[kB1], e.moment[0], V::Mul(k[kC1], e.grad));
    const auto v = SecondMoment<V>(k, e.moment[1], g2);
    const auto s = V::Sqrt(v);
    const auto u = V::Div(m, V::Add(s, k[kEps]));
    Updated<V> r;
    TakeStep<V>(k[kMinusLr], u, e.weight, k[kMinusDecay], &r);
    r.moment[0] = m;
    r.moment[1] = v;
    r.root[1] = s;
    r.rms_term = V::Div(g2, V::Max(v, k[kEps2]));
    return r;
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
