// companded8: 8-bit codes with a bf16 scale for each block of 32. The scale A is the block's largest magnitude rounded
// up to bf16, and codes are taken relative to the stored scale, so its rounding adds no error.
//
//   m: level k = k/(254-k) * A with a sign, k = 0..127; position f = 254 m / (|m|+A).
//   v: stored as levels of sqrt(v): k * (A/255), k = 0..255; position t = sqrt(v) * (255/A).
//      Code 0 of a live block decodes to v = 0.25 (A/255)^2, so that |m|/sqrt(v) stays bounded.
//
// Stochastic rounding is in the value domain: between neighbouring levels the upper one is taken with the probability
// that makes the expectation of the decoded value exact. With u uniform in (0, 1):
//   m: the probability is p = x - c x (1-x), x the fraction of |f| and c = 1 / (254 - |f|) = (|m|+A) / (254 A). To take
//      it, u is bent instead of x: floor(f + u - c u (1-u)) for m >= 0 and floor(f + u + c u (1-u)) for m < 0 are that
//      to c^2/10, at most 6e-6 of a level. So a code costs one addition after its position, with no comparison.
//   v: with k = floor(t), k+1 if u(2k+1) < t^2 - k^2, and for k = 0 if 0.75u < t^2 - 0.25
// Nearest rounds the position. Deterministic codes stall inside a moving average; stochastic ones do not.
#pragma once

#include "kernels/formats/bf16.h"
#include "kernels/formats/format.h"
#include "kernels/math/random.h"
#include "kernels/simd/division.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// The bits of the least bf16 number >= the finite non-negative fp32 with these bits.
template <class V>
BALLAST_FN typename V::U Bf16RoundedUp(typename V::U absmax) {
  return V::template ShiftRight<16>(V::AddBits(absmax, V::SetBits(0xffffu)));
}

// What an encoder divides by: A, 1 for a block of zeros.
template <class V>
BALLAST_FN typename V::F DivisorOf(typename V::U scale) {
  return V::Select(V::EqualBits(scale, V::SetBits(0)), V::Set(1.0f), FromBf16<V>(scale));
}

struct Companded8Signed {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1, true}, {"scale", 2, 32}};
  static constexpr uint32_t kScalePer = 32;
  static constexpr bool kStoresRoot = false;
  static constexpr uint32_t kLargestBits = kernels::kLargestBits;

  template <class V>
  static BALLAST_FN typename V::U Scale(typename V::U absmax) {
    return Bf16RoundedUp<V>(absmax);
  }

  template <class V>
  struct Decoder {
    static constexpr int kNumbers = 1;
    typename V::F number[kNumbers];  // A

    static BALLAST_FN Decoder Of(typename V::U scale) { return {{FromBf16<V>(scale)}}; }
    BALLAST_FN typename V::F Decode(typename V::U code) const {
      const auto k = V::FromInteger(code);
      return V::Mul(DivIntegers<V>(k, V::Sub(V::Set(254.0f), V::Abs(k))), number[0]);
    }
  };

  template <class V>
  struct Encoder {
    static constexpr int kNumbers = 2;
    typename V::F number[kNumbers];  // A, 1 / (254 A)

    static BALLAST_FN Encoder Of(typename V::U scale, typename V::U) {
      const auto a = DivisorOf<V>(scale);
      return {{a, DivScales<V>(V::Set(1.0f / 254), V::Max(a, V::Set(0x1p-118f)))}};
    }
    template <bool kStochastic>
    BALLAST_FN typename V::U Encode(typename V::F x, typename V::U random) const {
      typename V::F sought;  // from 1 up, so that its whole part is its floor
      const auto sum = V::Add(V::Abs(x), number[0]), ratio = DivScales<V>(x, sum);
      if constexpr (kStochastic) {
        const auto dither = Dither<V>(V::And(random, V::SetBits(0xffff))), u = V::Sub(dither, V::Set(128.0f));
        const auto bend = V::WithSignOf(x, V::Mul(V::Fnma(u, u, u), number[1]));
        sought = V::Fnma(bend, sum, V::Fma(V::Set(254.0f), ratio, dither));
      } else {
        sought = V::Fma(V::Set(254.0f), ratio, V::Set(128.5f));
      }
      return V::Xor(V::Truncate(sought), V::SetBits(128));
    }
  };

  template <class V>
  static BALLAST_FN typename V::M Saturated(typename V::U code) {
    return V::EqualBits(V::MaxBits(code, V::SubBits(V::SetBits(0), code)), V::SetBits(127));
  }
};

struct Companded8NonNegative {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1}, {"scale", 2, 32}};
  static constexpr uint32_t kScalePer = 32;
  static constexpr bool kStoresRoot = true;
  static constexpr uint32_t kLargestBits =
      0x5f7f0000u;  // the last bf16 below 2^64: the largest code's square is finite

  template <class V>
  static BALLAST_FN typename V::U Scale(typename V::U absmax) {
    return Bf16RoundedUp<V>(absmax);
  }

  template <class V>
  struct Decoder {
    static constexpr int kNumbers = 2;
    typename V::F number[kNumbers];  // A / 255, what code 0 decodes to

    static BALLAST_FN Decoder Of(typename V::U scale) {
      const auto step = DivScales<V>(FromBf16<V>(scale), V::Set(255.0f));
      return {{step, V::Mul(V::Set(0.25f), V::Mul(step, step))}};
    }
    BALLAST_FN typename V::F Decode(typename V::U code) const {
      const auto root = V::Mul(V::FromInteger(code), number[0]);
      return V::MaxOfNonNegative(V::Mul(root, root), number[1]);  // which only code 0 lies below
    }
  };

  template <class V>
  struct Encoder {
    static constexpr int kNumbers = 1;
    typename V::F number[kNumbers];  // 255 / A

    static BALLAST_FN Encoder Of(typename V::U scale, typename V::U) {
      return {{DivScales<V>(V::Set(255.0f), DivisorOf<V>(scale))}};
    }
    template <bool kStochastic>
    BALLAST_FN typename V::U Encode(typename V::F root, typename V::U random) const {
      const auto t = V::Mul(root, number[0]);
      if constexpr (kStochastic) {
        const auto k = V::Truncate(t);
        const auto kf = V::FromInteger(k), next = V::Add(kf, V::Set(1.0f));
        // The square of the level, 0.25 for k = 0, and the distance to the next: small integers and quarters, exact.
        const auto below = V::MaxOfNonNegative(V::Mul(kf, kf), V::Set(0.25f)), width = V::Fms(next, next, below);
        const auto u = Uniform<V>(V::template ShiftRight<16>(random));
        const auto code = V::IncrementIf(V::Less(V::Mul(u, width), V::Fms(t, t, below)), k);
        // A position may be rounded to just above 255.
        if constexpr (requires { V::kSaturatesBytes; }) return code;
        return V::MinBits(code, V::SetBits(255));
      } else {
        return V::Truncate(V::Add(t, V::Set(0.5f)));
      }
    }
  };

  template <class V>
  static BALLAST_FN typename V::M Saturated(typename V::U code) {
    return V::EqualBits(code, V::SetBits(255));
  }
};

struct Companded8State {
  static constexpr const char* kName = "companded8";
  using Signed = Companded8Signed;
  using NonNegative = Companded8NonNegative;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
