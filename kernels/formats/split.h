// split24 and split32: fp32 rounded to 24 bits, and fp32 exactly, laid out as a bf16 weight `hi` that is served as it
// is, and a signed correction `lo`. Integer arithmetic on the bit pattern, sign included, throughout:
//
//   split24: u = (bits(x) + r) >> 8, r = 8 random bits or 0x80;   hi = (u + 0x80) >> 8;      lo = u - (hi << 8)
//   split32: u = bits(x);                                         hi = (u + 0x8000) >> 16;   lo = u - (hi << 16)
//   decode:  ((hi << k) + lo), shifted back to 32 bits
//
// Decode then encode is the identity on every pattern an encoder makes. Encode is given values of which hi is finite:
// whoever may have others saturates them first. hi = +-0 with lo < 0 is never made.
#pragma once

#include "kernels/formats/format.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// LoBits: 8 or 16.
template <int LoBits>
struct Split {
  static constexpr bool kPaired = false;
  static constexpr uint32_t kHalf = 1u << (LoBits - 1);
  static constexpr uint32_t kSaturated = ((0x7f7fu << LoBits) + (kHalf - 1)) << (16 - LoBits);  // both at their largest

  template <class L>
  static BALLAST_FN typename L::F Decode(const Words<L>& w) {
    const auto kept = L::AddBits(L::template ShiftLeft<LoBits>(w.word[0]), w.word[1]);
    return L::FromBits(L::template ShiftLeft<16 - LoBits>(kept));
  }

  // From the 16 + LoBits bits that are kept.
  template <class L>
  static BALLAST_FN Words<L> Pack(typename L::U u) {
    const auto hi = L::template ShiftRight<LoBits>(L::AddBits(u, L::SetBits(kHalf)));
    return {{hi, L::SubBits(u, L::template ShiftLeft<LoBits>(hi))}};
  }
};

struct Split24 : Split<8> {
  static constexpr const char* kName = "split24";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 1, 1, true}};

  template <class L, bool kStochastic>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U random) {
    auto r = L::SetBits(0x80);
    if constexpr (kStochastic) r = L::template ShiftRight<24>(random);
    return Pack<L>(L::template ShiftRight<8>(L::AddBits(L::Bits(x), r)));
  }
};

struct Split32 : Split<16> {
  static constexpr const char* kName = "split32";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 2, 1, true}};

  template <class L, bool>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U) {
    return Pack<L>(L::Bits(x));
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
