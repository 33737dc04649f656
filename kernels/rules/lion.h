// Lion (Chen et al., arXiv 2302.06675):
//
//   u = sign(fma(b1, m, RN((1-b1) g))), sign(0) = 0;  m = fma(b2, m, RN((1-b2) g))
//   d = fma(-lr, u, RN(x e));  x = RN(x + d);  e = -lr wd, or -wd lr/lr_peak
#pragma once

#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr Hyper kHypers[] = {
      HyperLr(1e-4),
      HyperDecay(0),
      HyperBeta1(0.9),
      {"beta2", 0.99, 0, 1, false, true, ScaledBy::kNothing, "decay of the mean of gradients that is kept"},
      HyperLrPeak()};
  static constexpr Moment kMoments[] = {Moment::kSigned};
  static constexpr bool kHasRms = false;
  static constexpr bool kTwoPass = false;
  static constexpr bool kInHalves = false;

  enum Constant { kB1, kC1, kB2, kC2, kMinusLr, kMinusDecay, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t, float* constants) {
    const double lr = hyper[0], b1 = hyper[2], b2 = hyper[3];
    const double taken = DecoupledDecay(lr, hyper[1], hyper[4]);
    const double values[kConstants] = {b1, 1 - b1, b2, 1 - b2, -lr, -taken};
    for (int i = 0; i < kConstants; ++i) constants[i] = static_cast<float>(values[i]);
  }

  template <class V>
  static BALLAST_FN Updated<V> Apply(const typename V::F* k, const Element<V>& e) {
    const auto direction = V::Fma(k[kB1], e.moment[0], V::Mul(k[kC1], e.grad));
    const auto sign = V::And(V::Bits(direction), V::SetBits(kSignBit));
    const auto one = V::FromBits(V::Or(V::Bits(V::Set(1.0f)), sign));
    const auto u = V::Select(V::Less(V::Set(0.0f), V::Abs(direction)), one, V::Set(0.0f));
    Updated<V> r;
    TakeStep<V>(k[kMinusLr], u, e.weight, k[kMinusDecay], &r);
    r.moment[0] = V::Fma(k[kB2], e.moment[0], V::Mul(k[kC2], e.grad));
    return r;
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
