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
template <class L>
BALLAST_FN typename L::F RoundToBf16(typename L::F x) {
  const auto bits = L::Bits(x);
  const auto odd = L::And(L::template ShiftRight<16>(bits), L::SetBits(1));
  const auto rounded = L::AddBits(L::AddBits(bits, L::SetBits(0x7fff)), odd);
  const auto nan = L::GreaterBits(L::And(bits, L::SetBits(kMagnitude)), L::SetBits(kInfinityBits));
  return L::FromBits(L::SelectBits(nan, bits, L::And(rounded, L::SetBits(0xffff0000u))));
}

template <class L>
BALLAST_FN typename L::F FromBf16(typename L::U word) {
  return L::FromBits(L::template ShiftLeft<16>(word));
}

// The word of a finite value that does not round to infinity. r < 2^16 is added below the cut.
template <class L>
BALLAST_FN typename L::U ToBf16Word(typename L::F x, typename L::U r) {
  return L::template ShiftRight<16>(L::AddBits(L::Bits(x), r));
}
template <class L>
BALLAST_FN typename L::U NearestBf16Word(typename L::F x) {
  const auto odd = L::And(L::template ShiftRight<16>(L::Bits(x)), L::SetBits(1));
  return ToBf16Word<L>(x, L::AddBits(L::SetBits(0x7fff), odd));
}

inline constexpr uint32_t kSaturatedBf16 = 0x7f7f7fffu;  // the largest that does not round to infinity

struct Bf16Master {
  static constexpr const char* kName = "bf16";
  static constexpr StoredPlane kPlanes[] = {{"weight", 2, 1}};
  static constexpr bool kPaired = false;
  static constexpr uint32_t kSaturated = kSaturatedBf16;

  template <class L>
  static BALLAST_FN typename L::F Decode(const Words<L>& w) {
    return FromBf16<L>(w.word[0]);
  }
  template <class L, bool kStochastic>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U random) {
    if constexpr (kStochastic) {
      return {{ToBf16Word<L>(x, L::template ShiftRight<16>(random))}};
    } else {
      return {{NearestBf16Word<L>(x)}};
    }
  }
};

// hi = bf16(x), lo = bf16(x - hi). Rules over mcf compute the components themselves and give them exactly.
struct McfMaster {
  static constexpr const char* kName = "mcf";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 2, 1}, {"weight.lo", 2, 1}};
  static constexpr bool kPaired = true;
  static constexpr uint32_t kSaturated = kSaturatedBf16;

  template <class L>
  static BALLAST_FN typename L::F Component(typename L::U word) {
    return FromBf16<L>(word);
  }
  template <class L>
  static BALLAST_FN typename L::F Decode(const Words<L>& w) {
    return L::Add(Component<L>(w.word[0]), Component<L>(w.word[1]));
  }
  template <class L, bool>
  static BALLAST_FN Words<L> Encode(typename L::F x, typename L::U) {
    const auto hi = NearestBf16Word<L>(x);
    return {{hi, NearestBf16Word<L>(L::Sub(x, FromBf16<L>(hi)))}};
  }
  template <class L>
  static BALLAST_FN Words<L> EncodePair(typename L::F hi, typename L::F lo) {
    return {{L::template ShiftRight<16>(L::Bits(hi)), L::template ShiftRight<16>(L::Bits(lo))}};
  }
};

inline constexpr uint32_t kLargestBf16Moment = 0x7f7effffu;  // of a v: it stays finite however it is rounded

// A slot in bf16. kShift: which half of the random word is its own. A v's root is not what is stored.
template <int kShift, bool kRandom, uint32_t kLargest>
struct Bf16Slot {
  static constexpr StoredPlane kPlanes[] = {{"", 2, 1}};
  static constexpr uint32_t kScalePer = 0;
  static constexpr bool kStoresRoot = false;
  static constexpr uint32_t kLargestBits = kLargest;

  template <class L>
  struct Decoder : NoNumbers<L> {
    BALLAST_FN typename L::F Decode(typename L::U code) const { return FromBf16<L>(code); }
  };
  template <class L>
  struct Encoder : NoNumbers<L> {
    template <bool kStochastic>
    BALLAST_FN typename L::U Encode(typename L::F x, typename L::U random) const {
      if constexpr (kStochastic && kRandom) {
        const auto r = L::And(L::template ShiftRight<kShift>(random), L::SetBits(0xffff));
        return ToBf16Word<L>(x, r);
      } else {
        return NearestBf16Word<L>(x);
      }
    }
  };
  template <class L>
  static BALLAST_FN typename L::M Saturated(typename L::U code) {
    return L::EqualBits(L::And(code, L::SetBits(0x7fff)), L::SetBits(0x7f7f));
  }
};

struct Bf16State {
  static constexpr const char* kName = "bf16";
  using Signed = Bf16Slot<0, true, kLargestBits>;
  using NonNegative = Bf16Slot<16, true, kLargestBf16Moment>;
};

// m is never an expansion; v is hi and, in a slot of its own, lo. The rule rounds; nothing is random.
struct McfState {
  static constexpr const char* kName = "mcf";
  using Signed = Bf16Slot<0, false, kLargestBits>;
  using NonNegative = Bf16Slot<0, false, kLargestBf16Moment>;
  using Residual = Bf16Slot<0, false, kLargestBits>;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
