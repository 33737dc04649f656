// companded8: 8-bit codes with a bf16 scale for each block of 32. The scale A is the block's largest magnitude rounded
// up to bf16, and codes are taken relative to the stored scale, so its rounding adds no error.
//
//   m: level k = k/(254-k) * A with a sign, k = 0..127; position f = 254|m| / (|m|+A).
//   v: stored as levels of sqrt(v): k * (A/255), k = 0..255; position t = sqrt(v) * (255/A).
//      Code 0 of a live block decodes to v = 0.25 (A/255)^2, so that |m|/sqrt(v) stays bounded.
//
// Stochastic rounding is in the value domain: between neighbouring levels the upper one is taken with the probability
// that makes the expectation of the decoded value exact. With k = floor(position) and u uniform in (0, 1):
//   m: k+1 if u * 254A < (|m|(254-k) - kA)(253-k)
//   v: k+1 if u(2k+1) < t^2 - k^2, and for k = 0 if 0.75u < t^2 - 0.25
// Nearest rounds the position. Deterministic codes stall inside a moving average; stochastic ones do not.
#pragma once

#include "kernels/formats/bf16.h"
#include "kernels/formats/format.h"
#include "kernels/math/random.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// The bits of the least bf16 number >= the finite non-negative fp32 with these bits.
template <class V>
BALLAST_FN typename V::U Bf16RoundedUp(typename V::U absmax) {
  return V::template ShiftRight<16>(V::AddBits(absmax, V::SetBits(0xffffu)));
}

// A position is held to the largest code before it is taken apart, so no code passes it: at the largest code nothing is
// left over to round up. A block of zeros has the largest code 0.
template <class V>
BALLAST_FN typename V::F LargestCode(typename V::U scale, float largest) {
  return V::Select(V::EqualBits(scale, V::SetBits(0)), V::Set(0.0f), V::Set(largest));
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
      return V::Mul(V::Div(k, V::Sub(V::Set(254.0f), V::Abs(k))), number[0]);
    }
  };

  template <class V>
  struct Encoder {
    static constexpr int kNumbers = 3;
    typename V::F number[kNumbers];  // A, 254 A, the largest code

    static BALLAST_FN Encoder Of(typename V::U scale, typename V::U) {
      const auto a = FromBf16<V>(scale);
      return {{a, V::Mul(V::Set(254.0f), a), LargestCode<V>(scale, 127.0f)}};
    }
    template <bool kStochastic>
    BALLAST_FN typename V::U Encode(typename V::F x, typename V::U random) const {
      const auto a = V::Abs(x);
      const auto position = V::Div(V::Mul(V::Set(254.0f), a), V::Add(a, number[0]));
      const auto bounded = V::Min(position, number[2]);  // also where both are 0 and the position is NaN
      const auto k = V::Truncate(bounded);
      const auto kf = V::FromInteger(k);
      typename V::M up;
      if constexpr (kStochastic) {
        const auto u = Uniform<V>(V::And(random, V::SetBits(0xffff)));
        const auto above = V::Sub(V::Mul(a, V::Sub(V::Set(254.0f), kf)), V::Mul(kf, number[0]));
        up = V::Less(V::Mul(u, number[1]), V::Mul(above, V::Sub(V::Set(253.0f), kf)));
      } else {
        up = V::LessEqual(V::Set(0.5f), V::Sub(bounded, kf));
      }
      const auto sign = V::template ShiftRightSigned<31>(V::Bits(x));
      return V::SubBits(V::Xor(V::IncrementIf(up, k), sign), sign);
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
      const auto step = V::Div(FromBf16<V>(scale), V::Set(255.0f));
      return {{step, V::Mul(V::Set(0.25f), V::Mul(step, step))}};
    }
    BALLAST_FN typename V::F Decode(typename V::U code) const {
      const auto root = V::Mul(V::FromInteger(code), number[0]);
      return V::Max(V::Mul(root, root), number[1]);  // which only code 0 lies below
    }
  };

  template <class V>
  struct Encoder {
    static constexpr int kNumbers = 2;
    typename V::F number[kNumbers];  // 255 / A, the largest code

    static BALLAST_FN Encoder Of(typename V::U scale, typename V::U) {
      const auto zero = V::EqualBits(scale, V::SetBits(0));
      const auto inverse = V::Div(V::Set(255.0f), V::Select(zero, V::Set(1.0f), FromBf16<V>(scale)));
      return {{inverse, LargestCode<V>(scale, 255.0f)}};
    }
    template <bool kStochastic>
    BALLAST_FN typename V::U Encode(typename V::F root, typename V::U random) const {
      const auto t = V::Min(V::Mul(root, number[0]), number[1]);
      const auto k = V::Truncate(t);
      const auto kf = V::FromInteger(k);
      typename V::M up;
      if constexpr (kStochastic) {
        const auto u = Uniform<V>(V::template ShiftRight<16>(random));
        // The square of the level, 0.25 for k = 0, and the distance to the next: small integers and quarters, exact.
        const auto level = V::Max(kf, V::Set(0.5f)), next = V::Add(kf, V::Set(1.0f));
        const auto below = V::Mul(level, level);
        const auto width = V::Sub(V::Mul(next, next), below);
        up = V::Less(V::Mul(u, width), V::Sub(V::Mul(t, t), below));
      } else {
        up = V::LessEqual(V::Set(0.5f), V::Sub(t, kf));
      }
      return V::IncrementIf(up, k);
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
