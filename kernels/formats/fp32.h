// fp32 stored as it is: the baseline master and state.
#pragma once

#include "kernels/formats/format.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct Fp32Master {
  static constexpr const char* kName = "fp32";
  static constexpr StoredPlane kPlanes[] = {{"weight", 4, 1}};
  static constexpr uint32_t kSaturated = kLargestFiniteBits;
  static constexpr bool kPaired = false;

  template <class L>
  static BALLAST_FN typename L::F Decode(const Words<L>& w) {
    return L::FromBits(w.word[0]);
  }
  template <class L, bool>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U) {
    return {{L::Bits(x)}};
  }
};

template <uint32_t kLargest>
struct Fp32Slot {
  static constexpr StoredPlane kPlanes[] = {{"", 4, 1}};
  static constexpr uint32_t kScalePer = 0;
  static constexpr bool kStoresRoot = false;
  static constexpr uint32_t kLargestBits = kLargest;

  template <class L>
  struct Decoder : NoNumbers<L> {
    BALLAST_FN typename L::F Decode(typename L::U code) const { return L::FromBits(code); }
  };
  template <class L>
  struct Encoder : NoNumbers<L> {
    template <bool>
    BALLAST_FN typename L::U Encode(typename L::F x, typename L::U) const {
      return L::Bits(x);
    }
  };
  template <class L>
  static BALLAST_FN typename L::M Saturated(typename L::U code) {
    return L::EqualBits(L::And(code, L::SetBits(kMagnitude)), L::SetBits(kLargestFiniteBits));
  }
};

struct Fp32State {
  static constexpr const char* kName = "fp32";
  using Signed = Fp32Slot<kLargestBits>;
  using NonNegative = Fp32Slot<kLargestFiniteBits>;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
