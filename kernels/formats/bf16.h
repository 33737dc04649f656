// bf16, the upper half of an fp32, and what is made of it: the master `bf16` (stochastic rounding, as in torchao), the
// state `bf16`, and Collage's two-component numbers `mcf` (arXiv 2405.03637), hi + lo with |lo| <= ulp(hi)/2.
//
//   stochastic: (bits(x) + r) >> 16, r = 16 random bits;   nearest: to even
#pragma once

#include "kernels/formats/format.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// To nearest even, as an fp32 with a lower half of zeros. A NaN stays as it is: its payload must not carry into the
// sign.
template <class V>
BALLAST_FN typename V::F RoundToBf16(typename V::F x) {
  const auto bits = V::Bits(x);
  const auto odd = V::And(V::template ShiftRight<16>(bits), V::SetBits(1));
  const auto rounded = V::AddBits(V::AddBits(bits, V::SetBits(0x7fff)), odd);
  const auto nan = V::GreaterBits(V::And(bits, V::SetBits(kMagnitude)), V::SetBits(kInfinityBits));
  return V::FromBits(V::SelectBits(nan, bits, V::And(rounded, V::SetBits(0xffff0000u))));
}

template <class V>
BALLAST_FN typename V::F FromBf16(typename V::U word) {
  return V::FromBits(V::template ShiftLeft<16>(word));
}

// The word of a finite value that does not round to infinity. r < 2^16 is added below the cut.
template <class V>
BALLAST_FN typename V::U ToBf16Word(typename V::F x, typename V::U r) {
  return V::template ShiftRight<16>(V::AddBits(V::Bits(x), r));
}
template <class V>
BALLAST_FN typename V::U NearestBf16Word(typename V::F x) {
  const auto odd = V::And(V::template ShiftRight<16>(V::Bits(x)), V::SetBits(1));
  return ToBf16Word<V>(x, V::AddBits(V::SetBits(0x7fff), odd));
}

inline constexpr uint32_t kSaturatedBf16 = 0x7f7f7fffu;  // the largest that does not round to infinity

struct Bf16Master {
  static constexpr const char* kName = "bf16";
  static constexpr StoredPlane kPlanes[] = {{"weight", 2, 1}};
  static constexpr bool kPaired = false;
  static constexpr uint32_t kSaturated = kSaturatedBf16;

  template <class V>
  static BALLAST_FN typename V::F Decode(const Words<V>& w) {
    return FromBf16<V>(w.word[0]);
  }
  template <class V, bool kStochastic>
  static BALLAST_FN Words<V> Encode(typename V::F x, typename V::U random) {
    if constexpr (kStochastic) {
      return {{ToBf16Word<V>(x, V::template ShiftRight<16>(random))}};
    } else {
      return {{NearestBf16Word<V>(x)}};
    }
  }
};

// hi = bf16(x), lo = bf16(x - hi). Rules over mcf compute the components themselves and give them exactly.
struct McfMaster {
  static constexpr const char* kName = "mcf";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 2, 1}};
  static constexpr bool kPaired = true;
  static constexpr uint32_t kSaturated = kSaturatedBf16;

  template <class V>
  static BALLAST_FN typename V::F Component(typename V::U word) {
    return FromBf16<V>(word);
  }
  template <class V>
  static BALLAST_FN typename V::F Decode(const Words<V>& w) {
    return V::Add(Component<V>(w.word[0]), Component<V>(w.word[1]));
  }
  template <class V, bool>
  static BALLAST_FN Words<V> Encode(typename V::F x, typename V::U) {
    const auto hi = NearestBf16Word<V>(x);
    return {{hi, NearestBf16Word<V>(V::Sub(x, FromBf16<V>(hi)))}};
  }
  template <class V>
  static BALLAST_FN Words<V> EncodePair(typename V::F hi, typename V::F lo) {
    return {{V::template ShiftRight<16>(V::Bits(hi)), V::template ShiftRight<16>(V::Bits(lo))}};
  }
};

inline constexpr uint32_t kLargestBf16Moment = 0x7f7effffu;  // of a v: it stays finite however it is rounded

// A moment in bf16. kShift: which half of the random word is its own. A v's root is not what is stored.
template <int kShift, bool kRandom, uint32_t kLargest>
struct Bf16Moment {
  static constexpr StoredPlane kPlanes[] = {{"", 2, 1}};
  static constexpr uint32_t kScalePer = 0;
  static constexpr bool kStoresRoot = false;
  static constexpr uint32_t kLargestBits = kLargest;

  template <class V>
  struct Decoder : NoNumbers<V> {
    BALLAST_FN typename V::F Decode(typename V::U code) const { return FromBf16<V>(code); }
  };
  template <class V>
  struct Encoder : NoNumbers<V> {
    template <bool kStochastic>
    BALLAST_FN typename V::U Encode(typename V::F x, typename V::U random) const {
      if constexpr (kStochastic && kRandom) {
        const auto r = V::And(V::template ShiftRight<kShift>(random), V::SetBits(0xffff));
        return ToBf16Word<V>(x, r);
      } else {
        return NearestBf16Word<V>(x);
      }
    }
  };
  template <class V>
  static BALLAST_FN typename V::M Saturated(typename V::U code) {
    return V::EqualBits(V::And(code, V::SetBits(0x7fff)), V::SetBits(0x7f7f));
  }
};

struct Bf16State {
  static constexpr const char* kName = "bf16";
  using Signed = Bf16Moment<0, true, kLargestBits>;
  using NonNegative = Bf16Moment<16, true, kLargestBf16Moment>;
};

// m is never an expansion; v is hi and, in a moment of its own, lo. The rule rounds; nothing is random.
struct McfState {
  static constexpr const char* kName = "mcf";
  using Signed = Bf16Moment<0, false, kLargestBits>;
  using NonNegative = Bf16Moment<0, false, kLargestBf16Moment>;
  using Residual = Bf16Moment<0, false, kLargestBits>;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
