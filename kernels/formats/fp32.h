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

  template <class V>
  static BALLAST_FN typename V::F Decode(const Words<V>& w) {
    return V::FromBits(w.word[0]);
  }
  template <class V, bool>
  static BALLAST_FN Words<V> Encode(typename V::F x, typename V::U) {
    return {{V::Bits(x)}};
  }
};

template <uint32_t kLargest>
struct Fp32Moment {
  static constexpr StoredPlane kPlanes[] = {{"", 4, 1}};
  static constexpr uint32_t kScalePer = 0;
  static constexpr bool kStoresRoot = false;
  static constexpr uint32_t kLargestBits = kLargest;

  template <class V>
  struct Decoder : NoNumbers<V> {
    BALLAST_FN typename V::F Decode(typename V::U code) const { return V::FromBits(code); }
  };
  template <class V>
  struct Encoder : NoNumbers<V> {
    template <bool>
    BALLAST_FN typename V::U Encode(typename V::F x, typename V::U) const {
      return V::Bits(x);
    }
  };
  template <class V>
  static BALLAST_FN typename V::M Saturated(typename V::U code) {
    return V::EqualBits(V::And(code, V::SetBits(kMagnitude)), V::SetBits(kLargestFiniteBits));
  }
};

struct Fp32State {
  static constexpr const char* kName = "fp32";
  using Signed = Fp32Moment<kLargestBits>;
  using NonNegative = Fp32Moment<kLargestFiniteBits>;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
