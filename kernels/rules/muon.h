// Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/; with weight decay and the scale of AdamW's updates,
// Liu et al., arXiv 2502.16982), as torch.optim.Muon: momentum whose matrix is made nearly orthogonal before it is taken.
// It is over whole matrices: a first pass makes the direction U of each element, bf16 numbers as fp32; between the
// passes kernels/matrix/newton_schulz.h makes O of all of them; the second pass takes it.
//
//   m = fma(mu, m, RN(c g)), c = 1 - mu;  U = bf16(m), with Nesterov bf16(fma(mu, m, RN(c g)));  0 in a block that is rejected
//   O = U made orthogonal;  s = sqrt(max(1, rows/columns)), or with match_rms .2 sqrt(max(rows, columns))
//   d = fma(-lr s, O, RN(x e)), e = -lr wd, or -wd lr/lr_peak;  x = RN(x + d)
#pragma once

#include <algorithm>

#include "kernels/formats/bf16.h"
#include "kernels/rules/sgd.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct Muon {
  static constexpr const char* kName = "muon";
  static constexpr Hyper kHypers[] = {
      HyperLr(1e-3),
      HyperDecay(0.1),
      {"momentum", 0.95, 0, 1, false, true, ScaledBy::kNothing, "share of the mean of gradients that stays"},
      {"nesterov", 1, 0, 1, false, false, ScaledBy::kNothing, "1: Nesterov momentum; 0: not"},
      {"match_rms", 0, 0, 1, false, false, ScaledBy::kNothing,
       "1: an update is as large as AdamW's, and takes its lr; 0: lr times sqrt(max(1, rows / columns))"},
      {"eps", 1e-7, 0, 1e6, true, false, ScaledBy::kNothing, "the least norm that a matrix is divided by"},
      HyperLrPeak()};
  static constexpr Moment kMoments[] = {Moment::kSigned};
  static constexpr bool kHasRms = false;
  static constexpr bool kTwoPass = true;
  static constexpr bool kOverMatrix = true;
  static constexpr bool kInHalves = false;

  enum Constant { kMu, kC, kOfMean, kOfGradient, kMinusLr, kMinusDecay, kMatchRms, kEps, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t, float* constants) {
    const double lr = hyper[0], mu = hyper[2];
    const bool nesterov = hyper[3] > 0;
    const double values[kConstants] = {mu,
                                       1 - mu,
                                       nesterov ? mu : 1,
                                       nesterov ? 1 - mu : 0,
                                       -lr,
                                       -DecoupledDecay(lr, hyper[1], hyper[6]),
                                       hyper[4] > 0 ? 1.0 : 0,
                                       0};
    for (int i = 0; i < kConstants; ++i) constants[i] = static_cast<float>(values[i]);
    constants[kEps] = AtLeastLeastNormal(hyper[5]);
  }

  // The step's length by the matrix's shape. Returns eps.
  static float Fit(uint64_t rows, uint64_t columns, float* constants) {
    const double r = static_cast<double>(rows), c = static_cast<double>(columns);
    const double factor = constants[kMatchRms] > 0 ? 0.2 * std::sqrt(std::max(r, c)) : std::sqrt(std::max(1.0, r / c));
    constants[kMinusLr] = static_cast<float>(static_cast<double>(constants[kMinusLr]) * factor);
    return constants[kEps];
  }

  template <class V>
  static BALLAST_FN typename V::F Mean(const typename V::F* k, typename V::F g, typename V::F old_m) {
    return V::Fma(k[kMu], old_m, V::Mul(k[kC], g));
  }
  // The first pass: m, and U of it.
  template <class V>
  struct Directed {
    typename V::F m, direction;
  };
  template <class V>
  static BALLAST_FN Directed<V> Direct(const typename V::F* k, typename V::F g, typename V::F old_m) {
    const auto m = Mean<V>(k, g, old_m);
    return {m, RoundToBf16<V>(V::Fma(k[kOfMean], m, V::Mul(k[kOfGradient], g)))};  // 1 m + 0 or mu m + (1 - mu) g
  }

  template <class V>
  static BALLAST_FN Updated<V> Apply(const typename V::F* k, const Element<V>& e) {
    Updated<V> r;
    r.moment[0] = Mean<V>(k, e.grad, e.moment[0]);
    TakeStep<V>(k[kMinusLr], e.direction, e.weight, k[kMinusDecay], &r);
    return r;
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
