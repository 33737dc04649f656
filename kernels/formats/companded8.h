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
template <class L>
BALLAST_FN typename L::U Bf16RoundedUp(typename L::U absmax) {
  return L::template ShiftRight<16>(L::AddBits(absmax, L::SetBits(0xffffu)));
}

// A position is held to the largest code before it is taken apart, so no code passes it: at the largest code nothing is
// left over to round up. A block of zeros has the largest code 0.
template <class L>
BALLAST_FN typename L::F LargestCode(typename L::U scale, float largest) {
  return L::Select(L::EqualBits(scale, L::SetBits(0)), L::Set(0.0f), L::Set(largest));
}

struct Companded8Signed {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1, true}, {"scale", 2, 32}};
  static constexpr uint32_t kScalePer = 32;
  static constexpr bool kStoresRoot = false;
  static constexpr uint32_t kLargestBits = kernels::kLargestBits;

  template <class L>
  static BALLAST_FN typename L::U Scale(typename L::U absmax) {
    return Bf16RoundedUp<L>(absmax);
  }

  template <class L>
  struct Decoder {
    static constexpr int kNumbers = 1;
    typename L::F number[kNumbers];  // A

    static BALLAST_FN Decoder Of(typename L::U scale) { return {{FromBf16<L>(scale)}}; }
    BALLAST_FN typename L::F Decode(typename L::U code) const {
      const auto k = L::FromInteger(code);
      return L::Mul(L::Div(k, L::Sub(L::Set(254.0f), L::Abs(k))), number[0]);
    }
  };

  template <class L>
  struct Encoder {
    static constexpr int kNumbers = 3;
    typename L::F number[kNumbers];  // A, 254 A, the largest code

    static BALLAST_FN Encoder Of(typename L::U scale, typename L::U) {
      const auto a = FromBf16<L>(scale);
      return {{a, L::Mul(L::Set(254.0f), a), LargestCode<L>(scale, 127.0f)}};
    }
    template <bool kStochastic>
    BALLAST_FN typename L::U Encode(typename L::F x, typename L::U random) const {
      const auto a = L::Abs(x);
      const auto position = L::Div(L::Mul(L::Set(254.0f), a), L::Add(a, number[0]));
      const auto bounded = L::Min(position, number[2]);  // also where both are 0 and the position is NaN
      const auto k = L::Truncate(bounded);
      const auto kf = L::FromInteger(k);
      typename L::M up;
      if constexpr (kStochastic) {
        const auto u = Uniform<L>(L::And(random, L::SetBits(0xffff)));
        const auto above = L::Sub(L::Mul(a, L::Sub(L::Set(254.0f), kf)), L::Mul(kf, number[0]));
        up = L::Less(L::Mul(u, number[1]), L::Mul(above, L::Sub(L::Set(253.0f), kf)));
      } else {
        up = L::LessEqual(L::Set(0.5f), L::Sub(bounded, kf));
      }
      const auto sign = L::template ShiftRightSigned<31>(L::Bits(x));
      return L::SubBits(L::Xor(L::IncrementIf(up, k), sign), sign);
    }
  };

  template <class L>
  static BALLAST_FN typename L::M Saturated(typename L::U code) {
    return L::EqualBits(L::MaxBits(code, L::SubBits(L::SetBits(0), code)), L::SetBits(127));
  }
};

struct Companded8NonNegative {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1}, {"scale", 2, 32}};
  static constexpr uint32_t kScalePer = 32;
  static constexpr bool kStoresRoot = true;
  static constexpr uint32_t kLargestBits =
      0x5f7f0000u;  // the last bf16 below 2^64: the largest code's square is finite

  template <class L>
  static BALLAST_FN typename L::U Scale(typename L::U absmax) {
    return Bf16RoundedUp<L>(absmax);
  }

  template <class L>
  struct Decoder {
    static constexpr int kNumbers = 2;
    typename L::F number[kNumbers];  // A / 255, what code 0 decodes to

    static BALLAST_FN Decoder Of(typename L::U scale) {
      const auto step = L::Div(FromBf16<L>(scale), L::Set(255.0f));
      return {{step, L::Mul(L::Set(0.25f), L::Mul(step, step))}};
    }
    BALLAST_FN typename L::F Decode(typename L::U code) const {
      const auto root = L::Mul(L::FromInteger(code), number[0]);
      return L::Max(L::Mul(root, root), number[1]);  // which only code 0 lies below
    }
  };

  template <class L>
  struct Encoder {
    static constexpr int kNumbers = 2;
    typename L::F number[kNumbers];  // 255 / A, the largest code

    static BALLAST_FN Encoder Of(typename L::U scale, typename L::U) {
      const auto zero = L::EqualBits(scale, L::SetBits(0));
      const auto inverse = L::Div(L::Set(255.0f), L::Select(zero, L::Set(1.0f), FromBf16<L>(scale)));
      return {{inverse, LargestCode<L>(scale, 255.0f)}};
    }
    template <bool kStochastic>
    BALLAST_FN typename L::U Encode(typename L::F root, typename L::U random) const {
      const auto t = L::Min(L::Mul(root, number[0]), number[1]);
      const auto k = L::Truncate(t);
      const auto kf = L::FromInteger(k);
      typename L::M up;
      if constexpr (kStochastic) {
        const auto u = Uniform<L>(L::template ShiftRight<16>(random));
        // The square of the level, 0.25 for k = 0, and the distance to the next: small integers and quarters, exact.
        const auto level = L::Max(kf, L::Set(0.5f)), next = L::Add(kf, L::Set(1.0f));
        const auto below = L::Mul(level, level);
        const auto width = L::Sub(L::Mul(next, next), below);
        up = L::Less(L::Mul(u, width), L::Sub(L::Mul(t, t), below));
      } else {
        up = L::LessEqual(L::Set(0.5f), L::Sub(t, kf));
      }
      return L::IncrementIf(up, k);
    }
  };

  template <class L>
  static BALLAST_FN typename L::M Saturated(typename L::U code) {
    return L::EqualBits(code, L::SetBits(255));
  }
};

struct Companded8State {
  static constexpr const char* kName = "companded8";
  using Signed = Companded8Signed;
  using NonNegative = Companded8NonNegative;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
