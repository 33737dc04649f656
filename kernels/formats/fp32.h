// fp32 stored as it is: the baseline master and state.
#pragma once

#include "kernels/formats/format.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct Fp32Master {
  static constexpr const char* kName = "fp32";
  static constexpr StoredPlane kPlanes[] = {{"weight", 4, 1}};

  template <class L>
  static BALLAST_FN typename L::F Decode(const Words<L>& w) {
    return L::FromBits(w.word[0]);
  }
  template <class L>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U, bool) {
    return {{L::Bits(x)}};
  }
};

// Either slot: the value itself, no scale.
struct Fp32Slot {
  static constexpr StoredPlane kPlanes[] = {{"", 4, 1}};
  static constexpr bool kStoresRoot = false;

  static BALLAST_FN uint32_t Scale(uint32_t) { return 0; }
  template <class L>
  struct Block {
    BALLAST_FN explicit Block(uint32_t) {}
    BALLAST_FN typename L::F Decode(typename L::U code) const { return L::FromBits(code); }
    BALLAST_FN typename L::U Encode(typename L::F x, typename L::U, bool) const { return L::Bits(x); }
  };
  static BALLAST_FN bool Saturated(uint32_t) { return false; }
};

struct Fp32State {
  static constexpr const char* kName = "fp32";
  using Signed = Fp32Slot;
  using NonNegative = Fp32Slot;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
