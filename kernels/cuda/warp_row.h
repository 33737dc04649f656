// What the GPU driver and its codecs are made of: the words of a row as a warp holds them, eight elements a thread, and
// sums over a tile. Written over a warp lane (simd/warp.h).
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "kernels/formats/format.h"
#include "kernels/lists.h"
#include "kernels/math/statistics.h"
#include "kernels/registry.h"
#include "kernels/simd/warp.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

static_assert(kRow == static_cast<uint64_t>(kWarpThreads) * kEach);
inline constexpr int kBlockThreads = static_cast<int>(kBlock) / kEach;  // that share a block

// The threads' words of a plane with this many bytes an element, as stored.
constexpr int WordsEach(uint32_t bytes) { return static_cast<int>(bytes) * kEach / 4; }
inline constexpr int kMostWords = WordsEach(4);

// Byte or half kPart of a word, extended by zeros or by its sign.
template <class L, uint32_t kBytes, bool kSigned, int kPart>
BALLAST_FN typename L::U PartOf(typename L::U word) {
  constexpr int kBits = static_cast<int>(kBytes) * 8;
  if constexpr (kSigned) {
    return L::template ShiftRightSigned<32 - kBits>(L::template ShiftLeft<32 - kBits*(kPart + 1)>(word));
  } else {
    return L::And(L::template ShiftRight<kBits * kPart>(word), L::SetBits((1u << kBits) - 1));
  }
}

// A thread's words of a plane taken apart, one for each element, and put together again.
template <class L, uint32_t kBytes, bool kSigned>
BALLAST_FN void Unpack(const typename L::U* packed, typename L::U (&out)[kEach]) {
  BALLAST_UNROLL for (int i = 0; i < WordsEach(kBytes); ++i) {
    if constexpr (kBytes == 4) {
      out[i] = packed[i];
    } else if constexpr (kBytes == 2) {
      out[2 * i] = PartOf<L, 2, kSigned, 0>(packed[i]);
      out[2 * i + 1] = PartOf<L, 2, kSigned, 1>(packed[i]);
    } else {
      out[4 * i] = PartOf<L, 1, kSigned, 0>(packed[i]);
      out[4 * i + 1] = PartOf<L, 1, kSigned, 1>(packed[i]);
      out[4 * i + 2] = PartOf<L, 1, kSigned, 2>(packed[i]);
      out[4 * i + 3] = PartOf<L, 1, kSigned, 3>(packed[i]);
    }
  }
}
template <class L, uint32_t kBytes>
BALLAST_FN void Pack(const typename L::U (&words)[kEach], typename L::U (&packed)[WordsEach(kBytes)]) {
  const auto masked = [&](int i) { return L::And(words[i], L::SetBits((1u << (kBytes % 4 * 8)) - 1)); };
  BALLAST_UNROLL for (int i = 0; i < WordsEach(kBytes); ++i) {
    if constexpr (kBytes == 4) {
      packed[i] = words[i];
    } else if constexpr (kBytes == 2) {
      packed[i] = L::Or(masked(2 * i), L::template ShiftLeft<16>(words[2 * i + 1]));
    } else {
      const auto low = L::Or(masked(4 * i), L::template ShiftLeft<8>(masked(4 * i + 1)));
      const auto high = L::Or(masked(4 * i + 2), L::template ShiftLeft<8>(masked(4 * i + 3)));
      packed[i] = L::Or(low, L::template ShiftLeft<16>(high));
    }
  }
}

template <class L, uint32_t kBytes>
BALLAST_FN void StoreRow(std::byte* row, const typename L::U (&words)[kEach], typename L::M where) {
  typename L::U packed[WordsEach(kBytes)];
  Pack<L, kBytes>(words, packed);
  L::StoreVector(row, packed, where);
}

// The first `count` elements of a row.
template <class L>
BALLAST_FN typename L::M Inside(uint64_t count, int j) {
  return L::GreaterBits(L::SetBits(static_cast<uint32_t>(count)),
                        L::AddBits(L::Position(), L::SetBits(static_cast<uint32_t>(j))));
}

template <class L>
BALLAST_FN typename L::U MagnitudeOf(typename L::F x) {
  return L::And(L::Bits(x), L::SetBits(kMagnitude));
}

// A slot's decoder for the thread's block.
template <class L, class S>
BALLAST_FN auto DecoderOf(typename L::U scale) {
  using D = typename S::template Decoder<L>;
  if constexpr (D::kNumbers > 0) {
    return D::Of(scale);
  } else {
    return D{};
  }
}

// The largest over the threads of a block, over a row; as signed integers.
template <class L>
BALLAST_FN typename L::U OverBlock(typename L::U x) {
  static_assert(kBlockThreads == 4);
  x = L::MaxBits(x, L::template Exchange<1>(x));
  return L::MaxBits(x, L::template Exchange<2>(x));
}
template <class L>
BALLAST_FN typename L::U OverRow(typename L::U x) {
  x = OverBlock<L>(x);
  x = L::MaxBits(x, L::template Exchange<4>(x));
  x = L::MaxBits(x, L::template Exchange<8>(x));
  return L::MaxBits(x, L::template Exchange<16>(x));
}

// Words of a payload as a row of gradients: decoded, times `scale`; past `count` they are +0, whatever was read.
template <class L, class Wire>
BALLAST_FN void DecodeRow(const typename L::U* packed, float scale, uint64_t count, typename L::F (&out)[kEach]) {
  typename L::U words[kEach];
  Unpack<L, Wire::kBytes, false>(packed, words);
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = L::Mul(Wire::template Decode<L>(words[j]), L::Set(scale));
  if (count >= kRow) return;
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = L::Select(Inside<L>(count, j), out[j], L::Set(0.0f));
}

// Whether each element is infinite or NaN; `magnitude`: the bits of its absolute value.
template <class L>
BALLAST_FN typename L::M NotFinite(typename L::U magnitude) {
  return L::GreaterBits(magnitude, L::SetBits(kInfinityBits - 1));
}

// A thread's gradients: the largest magnitude; where one is not finite, how many are not, and the largest of the rest.
template <class L>
struct GradientRange {
  typename L::U most, nonfinite, largest_finite;
};
template <class L>
BALLAST_FN GradientRange<L> RangeOf(const typename L::F (&grad)[kEach]) {
  GradientRange<L> range{L::SetBits(0), L::SetBits(0), L::SetBits(0)};
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) range.most = L::MaxBits(range.most, MagnitudeOf<L>(grad[j]));
  range.largest_finite = range.most;
  if (!L::Any(NotFinite<L>(range.most))) return range;
  range.largest_finite = L::SetBits(0);
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
    const auto magnitude = MagnitudeOf<L>(grad[j]);
    range.nonfinite = L::IncrementIf(NotFinite<L>(magnitude), range.nonfinite);
    range.largest_finite =
        L::MaxBits(range.largest_finite, L::SelectBits(NotFinite<L>(magnitude), L::SetBits(0), magnitude));
  }
  return range;
}

// Calls act.operator()<Wire>() for the format with this index.
template <class Act, class... Wires>
BALLAST_FN void WithWire(WireIndex index, List<Wires...>, Act&& act) {
  int i = 0;
  ((i++ == index ? act.template operator()<Wires>() : void()), ...);
}

// 256 numbers of a row, or sums over a tile, in `lanes`, which no other warp touches; sums are in TileSum's order.
template <class L>
class WarpSum {
 public:
  using Values = typename L::F[kEach];
  BALLAST_FN explicit WarpSum(float* lanes) : lanes_(reinterpret_cast<std::byte*>(lanes)) {}

  BALLAST_FN void Set(const Values& values) {
    typename L::U bits[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) bits[j] = L::Bits(values[j]);
    L::StoreVector(lanes_, bits, All());
  }
  BALLAST_FN void Get(Values& values) const {
    typename L::U bits[kEach];
    L::LoadVector(lanes_, bits);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) values[j] = L::FromBits(bits[j]);
  }
  BALLAST_FN void Clear() { ClearWhere(All()); }
  BALLAST_FN void ClearWhere(typename L::M where) {
    typename L::U zeros[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) zeros[j] = L::SetBits(0);
    L::StoreVector(lanes_, zeros, where);
  }
  // What lies past `count` becomes 0.
  BALLAST_FN void Keep(uint64_t count) {
    Values values;
    Get(values);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      values[j] = L::Select(Inside<L>(count, j), values[j], L::Set(0.0f));
    }
    Set(values);
  }
  BALLAST_FN void Add(const Values& terms) {
    Values sums;
    Get(sums);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) sums[j] = L::Add(sums[j], terms[j]);
    Set(sums);
  }
  BALLAST_FN typename L::F Total() const {
    Values sums;
    Get(sums);
    BALLAST_UNROLL for (int width = kEach / 2; width > 0; width /= 2) {
      BALLAST_UNROLL for (int j = 0; j < width; ++j) sums[j] = L::Add(sums[2 * j], sums[2 * j + 1]);
    }
    auto sum = AddOther<1>(sums[0]);
    sum = AddOther<2>(sum);
    sum = AddOther<4>(sum);
    sum = AddOther<8>(sum);
    return AddOther<16>(sum);
  }

 private:
  static BALLAST_FN typename L::M All() { return L::EqualBits(L::SetBits(0), L::SetBits(0)); }
  template <int kMask>
  static BALLAST_FN typename L::F AddOther(typename L::F x) {
    return L::Add(x, L::FromBits(L::template Exchange<kMask>(L::Bits(x))));
  }
  std::byte* lanes_;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
