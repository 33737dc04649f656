// Collage (Yu et al., arXiv 2405.03637): AdamW in bf16 alone, with a weight of two components (mcf), so that an update
// smaller than the weight's half ulp is kept. Every operation below is one rounding to bf16, written R:
//
//   g = R(g);  m = R(R(b1 m) + R(c1 g));  w = R(c2 R(g g))
//   light: v = R(R(b2 v) + w)        plus: (v, v_lo) = Grow(Mul((v, v_lo), (b2_hi, b2_lo)), w)
//   u = R(R(m/k1) / R(R(sqrt(R(v/k2))) + eps)), k = R(1 - b^t)
//   d = R(-lr R(u + R(wd x_hi)));  (x_hi, x_lo) = Grow((x_hi, x_lo), d)
//
// with b, c = 1-b, k, eps, lr, wd rounded to bf16 from double, and b2_lo = R(b2 - b2_hi). The wanted update is d. In
// the light form b2 = .999 rounds to 1 and v never falls: that is what the plus form fixes.
#pragma once

#include <algorithm>

#include "kernels/formats/bf16.h"
#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// To bf16's nearest, halves to even, in one rounding.
inline double NearestBf16(double x) {
  if (x == 0) return 0;
  const double spacing = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
  return std::nearbyint(x / spacing) * spacing;
}

// bf16 arithmetic on values that are bf16: fp32's, rounded once more. (24 bits hold sums, products, quotients and roots
// of 8-bit numbers well enough that rounding twice is rounding once.)
template <class V>
struct Bf16Math {
  using F = typename V::F;
  struct Pair {
    F hi, lo;
  };
  static BALLAST_FN F Add(F a, F b) { return RoundToBf16<V>(V::Add(a, b)); }
  static BALLAST_FN F Sub(F a, F b) { return RoundToBf16<V>(V::Sub(a, b)); }
  static BALLAST_FN F Mul(F a, F b) { return RoundToBf16<V>(V::Mul(a, b)); }
  static BALLAST_FN F Div(F a, F b) { return RoundToBf16<V>(V::Div(a, b)); }
  static BALLAST_FN F Sqrt(F a) { return RoundToBf16<V>(V::Sqrt(a)); }
  static BALLAST_FN F Fma(F a, F b, F c) { return RoundToBf16<V>(V::Fma(a, b, c)); }

  // hi + lo = a + b, for |a| >= |b|.
  static BALLAST_FN Pair FastTwoSum(F a, F b) {
    const F s = Add(a, b);
    return {s, Sub(b, Sub(s, a))};
  }
  static BALLAST_FN Pair Grow(Pair x, F d) {
    const Pair s = FastTwoSum(x.hi, d);
    return FastTwoSum(s.hi, Add(x.lo, s.lo));
  }
  static BALLAST_FN Pair Product(Pair x, Pair b) {
    const F p = Mul(x.hi, b.hi);
    const F e = Fma(x.hi, b.hi, V::FromBits(V::Xor(V::Bits(p), V::SetBits(kSignBit))));
    return FastTwoSum(p, Add(Add(Mul(x.lo, b.hi), Mul(x.hi, b.lo)), e));
  }
};

template <bool kPlus>
struct CollageRule {
  static constexpr Hyper kHypers[] = {HyperLr(1e-3), HyperDecay(1e-2), HyperBeta1(0.9), HyperBeta2(0.999),
                                      HyperEps(1e-8)};
  static constexpr bool kHasRms = true;
  static constexpr bool kTwoPass = false;
  static constexpr bool kInHalves = false;

  enum Constant { kB1, kC1, kB2, kB2Low, kC2, kK1, kK2, kEps, kMinusLr, kWd, kEps2, kConstants };

  static void Prepare(std::span<const double> hyper, uint64_t t, float* constants) {
    const double lr = hyper[0], decay = hyper[1], b1 = hyper[2], b2 = hyper[3], eps = hyper[4];
    const double b2_low = b2 - NearestBf16(b2);
    const double values[kConstants] = {b1,  1 - b1, b2,    b2_low, 1 - b2, 1 - Power(b1, t), 1 - Power(b2, t),
                                       eps, -lr,    decay, 0};
    for (int i = 0; i < kConstants; ++i) constants[i] = static_cast<float>(NearestBf16(values[i]));
    constants[kEps] = AtLeastLeastNormal(NearestBf16(eps));
    constants[kEps2] = AtLeastLeastNormal(eps * eps);
  }

  static Preconditioner Precondition(std::span<const double> hyper, uint64_t t) {
    const double k1 = NearestBf16(1 - Power(hyper[2], t)), k2 = NearestBf16(1 - Power(hyper[3], t));
    return {static_cast<float>(1 / k1), static_cast<float>(1 / std::sqrt(k2)),
            AtLeastLeastNormal(NearestBf16(hyper[4]))};
  }

  template <class V>
  static BALLAST_FN Updated<V> Apply(const typename V::F* k, const Element<V>& e) {
    using B = Bf16Math<V>;
    const auto g = RoundToBf16<V>(e.grad);
    const auto m = B::Add(B::Mul(k[kB1], e.moment[0]), B::Mul(k[kC1], g));
    const auto w = B::Mul(k[kC2], B::Mul(g, g));
    Updated<V> r;
    if constexpr (kPlus) {
      const auto v = B::Grow(B::Product({e.moment[1], e.moment[2]}, {k[kB2], k[kB2Low]}), w);
      r.moment[1] = V::Max(v.hi, V::Set(0.0f));
      r.moment[2] = v.lo;
    } else {
      r.moment[1] = B::Add(B::Mul(k[kB2], e.moment[1]), w);
    }
    const auto vhat = B::Div(r.moment[1], k[kK2]);
    const auto u = B::Div(B::Div(m, k[kK1]), B::Add(B::Sqrt(vhat), k[kEps]));
    r.delta = B::Mul(k[kMinusLr], B::Add(u, B::Mul(k[kWd], e.weight)));
    const auto x = B::Grow({e.weight, e.weight_low}, r.delta);
    r.weight = x.hi;
    r.weight_low = x.lo;
    r.moment[0] = m;
    r.rms_term = V::Div(V::Mul(e.grad, e.grad), V::Max(vhat, k[kEps2]));
    return r;
  }
};

struct CollageLight : CollageRule<false> {
  static constexpr const char* kName = "collage_light";
  static constexpr Moment kMoments[] = {Moment::kSigned, Moment::kNonNegative};
};

struct CollagePlus : CollageRule<true> {
  static constexpr const char* kName = "collage_plus";
  static constexpr Moment kMoments[] = {Moment::kSigned, Moment::kNonNegative, Moment::kResidual};
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
