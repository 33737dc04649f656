// split24 and split32: fp32 rounded to 24 bits, and fp32 exactly, laid out as a bf16 weight `hi` that is served as it
// is, and a signed correction `lo`. Integer arithmetic on the bit pattern throughout:
//
//   split24: u = (bits(x) + r) >> 8, r = 8 random bits or 0x80;   hi = (u + 0x80) >> 8;      lo = u - (hi << 8)
//   split32: u = bits(x);                                         hi = (u + 0x8000) >> 16;   lo = u - (hi << 16)
//   decode:  ((hi << k) + lo), shifted back to 32 bits
//
// Decode then encode is the identity on every pattern an encoder makes. A finite x whose hi would be infinite saturates
// to the largest finite value; hi = +-0 with lo < 0 is never made.
#pragma once

#include "kernels/formats/format.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// LoBits: 8 or 16.
template <int LoBits>
struct Split {
  static constexpr uint32_t kHalf = 1u << (LoBits - 1);
  static constexpr uint32_t kLoMask = (1u << LoBits) - 1;
  static constexpr uint32_t kLargest = (0x7f7fu << LoBits) + (kHalf - 1);  // hi = largest finite, lo = largest

  template <class L>
  static BALLAST_FN typename L::F Decode(const Words<L>& w) {
    const auto lo = L::SubBits(L::Xor(w.word[1], L::SetBits(kHalf)), L::SetBits(kHalf));  // sign-extended
    return L::FromBits(L::ShiftLeft(L::AddBits(L::ShiftLeft(w.word[0], LoBits), lo), 16 - LoBits));
  }

  // The 16 + LoBits bits kept of x.
  template <class L>
  static BALLAST_FN Words<L> Pack(typename L::U magnitude, typename L::U sign) {
    const auto kept = L::SelectBits(L::GreaterBits(magnitude, L::SetBits(kLargest)), L::SetBits(kLargest), magnitude);
    const auto hi = L::ShiftRight(L::AddBits(kept, L::SetBits(kHalf)), LoBits);
    const auto lo = L::And(L::SubBits(kept, L::ShiftLeft(hi, LoBits)), L::SetBits(kLoMask));
    return {{L::Or(hi, L::ShiftLeft(sign, 15)), lo}};
  }
};

struct Split24 : Split<8> {
  static constexpr const char* kName = "split24";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 1, 1}};

  template <class L>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U random, bool stochastic) {
    const auto r = stochastic ? L::ShiftRight(random, 24) : L::SetBits(0x80);
    const auto bits = L::Bits(x);
    const auto magnitude = L::ShiftRight(L::AddBits(L::And(bits, L::SetBits(0x7fffffffu)), r), 8);
    return Pack<L>(magnitude, L::ShiftRight(bits, 31));
  }
};

struct Split32 : Split<16> {
  static constexpr const char* kName = "split32";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 2, 1}};

  template <class L>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U, bool) {
    const auto bits = L::Bits(x);
    return Pack<L>(L::And(bits, L::SetBits(0x7fffffffu)), L::ShiftRight(bits, 31));
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
