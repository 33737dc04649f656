// Adam (Kingma and Ba, arXiv 1412.6980) and AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch's: bias
// correction folded into host constants. Each operation is one fp32 rounding:
//
//   Adam: g = fma(wd, x, g) first, and e = 0
//   m = fma(b1, m, RN(c1 g));  v = fma(b2, v, RN(c2 RN(g g)));  s = sqrt(v)
//   r = RN(1 / fma(s, q2, eps));  u = RN(m r);  d = fma(-a, u, RN(x e));  x = RN(x + d)
//   with c = 1 - b, q2 = 1/sqrt(1 - b2^t), a = lr/(1 - b1^t), e = -lr wd, or -wd lr/lr_peak
//
// The wanted update of the statistics is d; the RMS term is the square of RN(g r), g without Adam's decay.
#pragma once

#include <algorithm>

#include "kernels/rules/rule.h"
#include "kernels/simd/division.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <bool kDecoupled>
struct AdamRule {
  static constexpr Moment kMoments[] = {Moment::kSigned, Moment::kNonNegative};
  static constexpr bool kHasRms = true;
  static constexpr bool kTwoPass = false;
  static constexpr bool kInHalves = true;

  enum Constant { kB1, kC1, kB2, kC2, kQ2, kEps, kMinusA, kMinusDecay, kL2, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t t, float* constants) {
    const double lr = hyper[0], decay = hyper[1], b1 = hyper[2], b2 = hyper[3], eps = hyper[4];
    const double debias1 = 1 - Power(b1, t), debias2 = 1 - Power(b2, t);
    const double taken = kDecoupled ? DecoupledDecay(lr, decay, hyper[5]) : 0;
    const double values[kConstants] = {b1,  1 - b1,        b2,     1 - b2, 1 / std::sqrt(debias2),
                                       eps, -lr / debias1, -taken, decay};
    for (int i = 0; i < kConstants; ++i) constants[i] = static_cast<float>(values[i]);
    constants[kEps] = AtLeastLeastNormal(eps);
  }

  static Preconditioner Precondition(std::span<const double> hyper, uint64_t t) {
    return {static_cast<float>(1 / (1 - Power(hyper[2], t))), static_cast<float>(1 / std::sqrt(1 - Power(hyper[3], t))),
            AtLeastLeastNormal(hyper[4])};
  }

  template <class V>
  static BALLAST_FN void Moments(const typename V::F* k, const Element<V>& e, Updated<V>* r) {
    auto g = e.grad;
    if constexpr (!kDecoupled) g = V::Fma(k[kL2], e.weight, g);
    r->moment[0] = V::Fma(k[kB1], e.moment[0], V::Mul(k[kC1], g));
    r->moment[1] = V::Fma(k[kB2], e.moment[1], V::Mul(k[kC2], V::Mul(g, g)));
    r->root[1] = V::Sqrt(r->moment[1]);
  }
  template <class V>
  static BALLAST_FN void Step(const typename V::F* k, const Element<V>& e, Updated<V>* r) {
    const auto inverse = Inverse<V>(V::Fma(r->root[1], k[kQ2], k[kEps]));
    TakeStep<V, kDecoupled>(k[kMinusA], V::Mul(r->moment[0], inverse), e.weight, k[kMinusDecay], r);
    const auto alone = V::Mul(e.grad, inverse);
    r->rms_term = V::Mul(alone, alone);
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
