// AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch's: decoupled weight decay, bias correction folded into host
// constants. Each operation is one fp32 rounding:
//
//   m = RN(RN(b1 m) + RN(c1 g));  v = RN(RN(b2 v) + RN(c2 RN(g g)));  s = sqrt(v)
//   u = RN(m / fma(s, q2, eps));  x = fma(-a, u, RN(x d))
//   with c = 1 - b, q2 = 1/sqrt(1 - b2^t), a = lr/(1 - b1^t), d = 1 - lr wd
//
// The wanted update of the statistics is fma(-a, u, RN(-lr wd x)); vhat = v/(1 - b2^t).
#pragma once

#include <algorithm>

#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct AdamW {
  static constexpr const char* kName = "adamw";
  static constexpr Hyper kHypers[] = {
      {"lr", 1e-3, 0, 1e6, false, false, "learning rate"},
      {"weight_decay", 1e-2, 0, 1e6, false, false, "decoupled weight decay, times lr each step"},
      {"beta1", 0.9, 0, 1, false, true, "decay of the mean of gradients"},
      {"beta2", 0.999, 0, 1, false, true, "decay of the mean of squared gradients"},
      {"eps", 1e-8, 0, 1e6, true, false, "added to the root of the debiased mean of squares"},
  };
  static constexpr Slot kSlots[] = {Slot::kSigned, Slot::kNonNegative};

  enum Constant { kB1, kC1, kB2, kC2, kQ2, kEps, kMinusA, kD, kDecay, kDebias, kEps2, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t t, float* constants) {
    const double lr = hyper[0], decay = hyper[1], b1 = hyper[2], b2 = hyper[3], eps = hyper[4];
    const double debias1 = 1 - Power(b1, t), debias2 = 1 - Power(b2, t);
    const double values[kConstants] = {
        b1,          1 - b1,      b2,       1 - b2, 1 / std::sqrt(debias2), eps, -lr / debias1, 1 - lr * decay,
        -lr * decay, 1 / debias2, eps * eps};
    for (int i = 0; i < kConstants; ++i) constants[i] = static_cast<float>(values[i]);
    constants[kEps] = std::max(constants[kEps], std::numeric_limits<float>::min());
    constants[kEps2] = std::max(constants[kEps2], std::numeric_limits<float>::min());
  }

  template <class L>
  static BALLAST_FN Updated<L> Apply(const float* constants, const Element<L>& e) {
    const auto k = [constants](Constant i) { return L::Set(constants[i]); };
    const auto g2 = L::Mul(e.grad, e.grad);
    const auto m = L::Add(L::Mul(k(kB1), e.slot[0]), L::Mul(k(kC1), e.grad));
    const auto v = L::Add(L::Mul(k(kB2), e.slot[1]), L::Mul(k(kC2), g2));
    const auto s = L::Sqrt(v);
    const auto u = L::Div(m, L::Fma(s, k(kQ2), k(kEps)));
    const auto x = L::Fma(k(kMinusA), u, L::Mul(e.weight, k(kD)));
    const auto delta = L::Fma(k(kMinusA), u, L::Mul(e.weight, k(kDecay)));
    const auto rms_term = L::Div(g2, L::Max(L::Mul(v, k(kDebias)), k(kEps2)));
    return {x, delta, {m, v}, {m, s}, rms_term};
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
