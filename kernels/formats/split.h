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

  template <class V>
  static BALLAST_FN typename V::F Decode(const Words<V>& w) {
    return V::FromBits(V::AddBits(V::template ShiftLeft<16>(w.word[0]), V::template ShiftLeft<16 - LoBits>(w.word[1])));
  }

  // From the 16 + LoBits bits that are kept; lo is u's own low bits, of which only those are stored.
  template <class V>
  static BALLAST_FN Words<V> Pack(typename V::U bits) {
    return {{V::AddBits(bits, V::SetBits(0x8000)), bits}};
  }
};

struct Split24 : Split<8> {
  static constexpr const char* kName = "split24";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1, false, 16}, {"weight.lo", 1, 1, true, 8}};

  template <class V, bool kStochastic>
  static BALLAST_FN Words<V> Encode(typename V::F x, typename V::U random) {
    auto r = V::SetBits(0x80);
    if constexpr (kStochastic) r = V::template ShiftRight<24>(random);
    return Pack<V>(V::AddBits(V::Bits(x), r));
  }
};

struct Split32 : Split<16> {
  static constexpr const char* kName = "split32";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1, false, 16}, {"weight.lo", 2, 1, true, 0}};

  template <class V, bool>
  static BALLAST_FN Words<V> Encode(typename V::F x, typename V::U) {
    return Pack<V>(V::Bits(x));
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
