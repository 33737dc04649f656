// What every optimizer rule is made of: kName, kHypers, kMoments, kHasRms, Prepare (host constants, in double, rounded
// once) and, for one element over a vector type, Apply, or with kInHalves Moments and after it Step. Rules are
// element-wise.
//   Moments(k, e, &r)  r.moment and r.root from e
//   Step(k, e, &r)     the rest of r; of e it reads the weight and the gradient, of r the new m and the new root of v
// A rule in two halves leaves a CPU two short chains of operations instead of a long one (cpu/cpu_kernels.h). A rule
// that first needs a mean over the tensor has kTwoPass, Measure (what one element adds, and the second moment that
// results) and Finish. One over whole matrices has kTwoPass and kOverMatrix, Direct (the direction of one element, and
// the first moment that results), Fit (what the matrix's shape does to constants), and reads in Apply what became of
// the direction. A rule with kHasRms has m and v in its first two moments, and Precondition, which says how they become
// its update.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/registry.h"
#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <class Rule>
inline constexpr bool kIsOverMatrix = requires {
  Rule::kOverMatrix;
};

enum class Moment { kSigned, kNonNegative, kResidual };
inline constexpr int kMaxMoments = 3;

// One element before and after the update. `weight_low` is used where the master has two components, `direction` by
// rules over matrices.
template <class V>
struct Element {
  typename V::F grad, weight, weight_low, direction;
  typename V::F moment[kMaxMoments];
};
template <class V>
struct Updated {
  typename V::F weight, weight_low;
  typename V::F delta;  // d: the update wanted, before any rounding of the weight
  typename V::F moment[kMaxMoments];
  typename V::F root[kMaxMoments];  // sqrt of a NonNegative moment
  typename V::F rms_term;           // the square of what the gradient alone would ask for, where kHasRms
};

// What a rule makes of one element.
template <class V, class Rule>
BALLAST_FN Updated<V> ApplyRule(const typename V::F* k, const Element<V>& e) {
  if constexpr (Rule::kInHalves) {
    Updated<V> r;
    Rule::template Moments<V>(k, e, &r);
    Rule::template Step<V>(k, e, &r);
    return r;
  } else {
    return Rule::template Apply<V>(k, e);
  }
}

// The update wanted, d = fma(-lr, u, RN(x e)), and x = RN(x + d); without decoupled decay d = RN(-lr u).
template <class V, bool kDecoupled = true>
BALLAST_FN void TakeStep(typename V::F minus_lr, typename V::F u, typename V::F x, typename V::F minus_decay,
                         Updated<V>* r) {
  if constexpr (kDecoupled) {
    r->delta = V::Fma(minus_lr, u, V::Mul(x, minus_decay));
  } else {
    r->delta = V::Mul(minus_lr, u);
  }
  r->weight = V::Add(x, r->delta);
}

// b^t by square-and-multiply, since pow differs between C libraries.
inline double Power(double b, uint64_t t) {
  double result = 1;
  for (; t > 0; t >>= 1, b *= b) {
    if (t & 1) result *= b;
  }
  return result;
}

// An eps that does not vanish in fp32, so that nothing is divided by zero.
inline float AtLeastLeastNormal(double eps) {
  return std::max(static_cast<float>(eps), std::numeric_limits<float>::min());
}

// How much a decoupled decay takes off a weight at this step. lr_peak > 0: weight_decay * lr / lr_peak, so that the
// decay does not depend on the scale of lr (FlashOptim's decouple_lr, u-muP's independent decay); else lr *
// weight_decay.
inline double DecoupledDecay(double lr, double weight_decay, double lr_peak) {
  return lr_peak > 0 ? weight_decay * lr / lr_peak : lr * weight_decay;
}

// Hyperparameters that several rules share.
constexpr Hyper HyperLr(double value) {
  return {"lr", value, 0, 1e6, false, false, ScaledBy::kLrScale, "learning rate"};
}
constexpr Hyper HyperL2Decay() {
  return {"weight_decay", 0, 0, 1e6, false, false, ScaledBy::kWdScale, "L2 penalty, added to the gradient"};
}
constexpr Hyper HyperDecay(double value) {
  return {
      "weight_decay", value, 0, 1e6, false, false, ScaledBy::kWdScale, "decoupled weight decay, times lr each step"};
}
constexpr Hyper HyperBeta1(double value) {
  return {"beta1", value, 0, 1, false, true, ScaledBy::kNothing, "decay of the mean of gradients"};
}
constexpr Hyper HyperBeta2(double value) {
  return {"beta2", value, 0, 1, false, true, ScaledBy::kNothing, "decay of the mean of squared gradients"};
}
constexpr Hyper HyperEps(double value) {
  return {"eps", value, 0, 1e6, true, false, ScaledBy::kNothing, "added to the root of the mean of squares"};
}
constexpr Hyper HyperLrPeak() {
  return {"lr_peak",
          0,
          0,
          1e6,
          false,
          false,
          ScaledBy::kLrScale,
          "above 0: the weight decay is multiplied by lr / lr_peak instead of lr"};
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
