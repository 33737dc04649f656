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

#include "kernels/formats/format.h"
#include "kernels/random.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// The bits of a bf16 number >= the finite non-negative fp32 with these bits.
BALLAST_FN uint32_t Bf16RoundedUp(uint32_t absmax_bits) { return (absmax_bits + 0xffffu) >> 16; }

// One more code where `up`, and never more than `largest`.
template <class L>
BALLAST_FN typename L::U RoundUpIf(typename L::M up, typename L::U k, uint32_t largest) {
  const auto next = L::SelectBits(up, L::AddBits(k, L::SetBits(1)), k);
  return L::SelectBits(L::GreaterBits(next, L::SetBits(largest)), L::SetBits(largest), next);
}

struct Companded8Signed {
  static constexpr StoredPlane kPlanes[] = {{"code", 1, 1}, {"scale", 2, 32}};
  static constexpr bool kStoresRoot = false;

  static BALLAST_FN uint32_t Scale(uint32_t absmax_bits) { return Bf16RoundedUp(absmax_bits); }
  static BALLAST_FN bool Saturated(uint32_t code) { return code == 0x7f || code == 0x81; }

  template <class L>
  struct Block {
    using F = typename L::F;
    using U = typename L::U;
    F scale, scale254;
    U live;  // all ones, or zero for a block of zeros

    BALLAST_FN explicit Block(uint32_t stored_scale)
        : scale(L::FromBits(L::SetBits(stored_scale << 16))),
          scale254(L::Mul(L::Set(254.0f), scale)),
          live(L::SetBits(stored_scale == 0 ? 0u : ~0u)) {}

    // The code is an int8 in the low byte of a word.
    BALLAST_FN F Decode(U code) const {
      const U negative = L::And(code, L::SetBits(0x80));
      const U k = L::SelectBits(L::EqualBits(negative, L::SetBits(0)), code, L::SubBits(L::SetBits(256), code));
      const F kf = L::FromInteger(k);
      const F magnitude = L::Mul(L::Div(kf, L::Sub(L::Set(254.0f), kf)), scale);
      return L::FromBits(L::Or(L::Bits(magnitude), L::ShiftLeft(negative, 24)));
    }

    BALLAST_FN U Encode(F x, U random, bool stochastic) const {
      const F a = L::Abs(x);
      const F position = L::Div(L::Mul(L::Set(254.0f), a), L::Add(a, scale));
      const F bounded = L::Min(position, L::Set(127.0f));  // also where both are 0 and the position is NaN
      const U k = L::Truncate(bounded);
      const F kf = L::FromInteger(k);
      typename L::M up;
      if (stochastic) {
        const F u = Uniform<L>(L::And(random, L::SetBits(0xffff)));
        const F above = L::Sub(L::Mul(a, L::Sub(L::Set(254.0f), kf)), L::Mul(kf, scale));
        up = L::Less(L::Mul(u, scale254), L::Mul(above, L::Sub(L::Set(253.0f), kf)));
      } else {
        up = L::LessEqual(L::Set(0.5f), L::Sub(bounded, kf));
      }
      const U code = L::And(RoundUpIf<L>(up, k, 127), live);
      const U negated = L::And(L::SubBits(L::SetBits(256), code), L::SetBits(0xff));
      return L::SelectBits(L::EqualBits(L::ShiftRight(L::Bits(x), 31), L::SetBits(0)), code, negated);
    }
  };
};

struct Companded8NonNegative {
  static constexpr StoredPlane kPlanes[] = {{"code", 1, 1}, {"scale", 2, 32}};
  static constexpr bool kStoresRoot = true;

  static BALLAST_FN uint32_t Scale(uint32_t absmax_bits) { return Bf16RoundedUp(absmax_bits); }
  static BALLAST_FN bool Saturated(uint32_t code) { return code == 255; }

  template <class L>
  struct Block {
    using F = typename L::F;
    using U = typename L::U;
    F step;     // A / 255
    F inverse;  // 255 / A
    F least;    // what code 0 decodes to
    U live;

    BALLAST_FN explicit Block(uint32_t stored_scale)
        : step(L::Div(L::FromBits(L::SetBits(stored_scale << 16)), L::Set(255.0f))),
          inverse(L::Set(0.0f)),
          least(L::Mul(L::Set(0.25f), L::Mul(step, step))),
          live(L::SetBits(stored_scale == 0 ? 0u : ~0u)) {
      if (stored_scale != 0) inverse = L::Div(L::Set(255.0f), L::FromBits(L::SetBits(stored_scale << 16)));
    }

    BALLAST_FN F Decode(U code) const {
      const F root = L::Mul(L::FromInteger(code), step);
      return L::Select(L::EqualBits(code, L::SetBits(0)), least, L::Mul(root, root));
    }

    // `root` = sqrt(v).
    BALLAST_FN U Encode(F root, U random, bool stochastic) const {
      const F t = L::Min(L::Mul(root, inverse), L::Set(255.0f));
      const U k = L::Truncate(t);
      const F kf = L::FromInteger(k);
      typename L::M up;
      if (stochastic) {
        const F u = Uniform<L>(L::ShiftRight(random, 16));
        const auto first = L::EqualBits(k, L::SetBits(0));
        const F width = L::Select(first, L::Set(0.75f), L::Add(L::Mul(L::Set(2.0f), kf), L::Set(1.0f)));
        const F below = L::Select(first, L::Set(0.25f), L::Mul(kf, kf));
        up = L::Less(L::Mul(u, width), L::Sub(L::Mul(t, t), below));
      } else {
        up = L::LessEqual(L::Set(0.5f), L::Sub(t, kf));
      }
      return L::And(RoundUpIf<L>(up, k, 255), live);
    }
  };
};

struct Companded8State {
  static constexpr const char* kName = "companded8";
  using Signed = Companded8Signed;
  using NonNegative = Companded8NonNegative;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
