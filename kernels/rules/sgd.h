// SGD with momentum as torch's (Sutskever et al. 2013; dampening does not touch the first buffer, which is g):
//
//   sgd (L2): g = fma(wd, x, g) first, and e = 0
//   sgdw (decoupled, arXiv 1711.05101): e = -lr wd, or -wd lr/lr_peak
//   b = fma(mu, b, RN(c g)), c = 1 - dampening; at t = 1 mu = 0, and where mu = 0, c = 1
//   u = b, with Nesterov fma(mu, b, g);  d = fma(-lr, u, RN(x e));  x = RN(x + d)
#pragma once

#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

constexpr Hyper HyperMomentum() {
  return {"momentum", 0, 0, 1, false, true, ScaledBy::kNothing, "share of the buffer that stays"};
}
constexpr Hyper HyperDampening() {
  return {"dampening", 0, 0, 1, false, false, ScaledBy::kNothing, "share of the gradient that the buffer is spared"};
}
constexpr Hyper HyperNesterov() {
  return {"nesterov", 0, 0, 1, false, false, ScaledBy::kNothing, "1: Nesterov momentum; 0: not"};
}

template <bool kDecoupled>
struct SgdRule {
  static constexpr Moment kMoments[] = {Moment::kSigned};
  static constexpr bool kHasRms = false;
  static constexpr bool kTwoPass = false;
  static constexpr bool kInHalves = false;

  enum Constant { kMu, kC, kOfBuffer, kOfGradient, kMinusLr, kMinusDecay, kL2, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t t, float* constants) {
    const double lr = hyper[0], decay = hyper[1], momentum = hyper[2];
    const double mu = t == 1 ? 0 : momentum, c = mu == 0 ? 1 : 1 - hyper[3];
    const bool nesterov = hyper[4] > 0;
    const double taken = kDecoupled ? DecoupledDecay(lr, decay, hyper[5]) : 0;
    const double values[kConstants] = {mu, c, nesterov ? momentum : 1, nesterov ? 1.0 : 0, -lr, -taken, decay};
    for (int i = 0; i < kConstants; ++i) constants[i] = static_cast<float>(values[i]);
  }

  template <class V>
  static BALLAST_FN Updated<V> Apply(const typename V::F* k, const Element<V>& e) {
    auto g = e.grad;
    if constexpr (!kDecoupled) g = V::Fma(k[kL2], e.weight, g);
    const auto b = V::Fma(k[kMu], e.moment[0], V::Mul(k[kC], g));
    const auto u = V::Fma(k[kOfBuffer], b, V::Mul(k[kOfGradient], g));  // 1 b + 0 or mu b + g
    Updated<V> r;
    TakeStep<V, kDecoupled>(k[kMinusLr], u, e.weight, k[kMinusDecay], &r);
    r.moment[0] = b;
    return r;
  }
};

struct Sgd : SgdRule<false> {
  static constexpr const char* kName = "sgd";
  static constexpr Hyper kHypers[] = {HyperLr(1e-3), HyperL2Decay(), HyperMomentum(), HyperDampening(),
                                      HyperNesterov()};
};

struct SgdW : SgdRule<true> {
  static constexpr const char* kName = "sgdw";
  static constexpr Hyper kHypers[] = {HyperLr(1e-3),    HyperDecay(0),   HyperMomentum(),
                                      HyperDampening(), HyperNesterov(), HyperLrPeak()};
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
