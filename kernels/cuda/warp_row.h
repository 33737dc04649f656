// What the GPU driver and its codecs are made of: the words of a row as a warp holds them, eight elements a thread, and
// sums over a tile. Written over a warp's vector type (simd/warp.h).
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
template <class V, uint32_t kBytes, bool kSigned, int kPart>
BALLAST_FN typename V::U PartOf(typename V::U word) {
  constexpr int kBits = static_cast<int>(kBytes) * 8;
  if constexpr (kSigned && kBytes == 1) {
    return V::template SignedByte<kPart>(word);
  } else if constexpr (kSigned) {
    return V::template ShiftRightSigned<32 - kBits>(V::template ShiftLeft<32 - kBits*(kPart + 1)>(word));
  } else {
    return V::And(V::template ShiftRight<kBits * kPart>(word), V::SetBits((1u << kBits) - 1));
  }
}

// A thread's words of a plane taken apart, one for each element, and put together again.
template <class V, uint32_t kBytes, bool kSigned>
BALLAST_FN void Unpack(const typename V::U* packed, typename V::U (&out)[kEach]) {
  BALLAST_UNROLL for (int i = 0; i < WordsEach(kBytes); ++i) {
    if constexpr (kBytes == 4) {
      out[i] = packed[i];
    } else if constexpr (kBytes == 2) {
      out[2 * i] = PartOf<V, 2, kSigned, 0>(packed[i]);
      out[2 * i + 1] = PartOf<V, 2, kSigned, 1>(packed[i]);
    } else {
      out[4 * i] = PartOf<V, 1, kSigned, 0>(packed[i]);
      out[4 * i + 1] = PartOf<V, 1, kSigned, 1>(packed[i]);
      out[4 * i + 2] = PartOf<V, 1, kSigned, 2>(packed[i]);
      out[4 * i + 3] = PartOf<V, 1, kSigned, 3>(packed[i]);
    }
  }
}
// Of each word the kBytes from byte kFrom on.
template <class V, uint32_t kBytes, int kFrom>
BALLAST_FN void Pack(const typename V::U (&words)[kEach], typename V::U (&packed)[WordsEach(kBytes)]) {
  BALLAST_UNROLL for (int i = 0; i < WordsEach(kBytes); ++i) {
    if constexpr (kBytes == 4) {
      packed[i] = words[i];
    } else if constexpr (kBytes == 2) {
      packed[i] = V::template JoinHalves<kFrom / 2>(words[2 * i], words[2 * i + 1]);
    } else {
      packed[i] = V::template JoinHalves<0>(V::template JoinBytes<kFrom>(words[4 * i], words[4 * i + 1]),
                                            V::template JoinBytes<kFrom>(words[4 * i + 2], words[4 * i + 3]));
    }
  }
}

template <class V, uint32_t kBytes, int kFrom = 0>
BALLAST_FN void StoreRow(std::byte* row, const typename V::U (&words)[kEach], typename V::M where) {
  typename V::U packed[WordsEach(kBytes)];
  Pack<V, kBytes, kFrom>(words, packed);
  V::StoreVector(row, packed, where);
}

// A row of encoded words of one of a format's planes.
template <class V, class Format, int kPlane>
BALLAST_FN void StorePlane(std::byte* row, const typename V::U (&words)[kEach], typename V::M where) {
  constexpr StoredPlane kStored = Format::kPlanes[kPlane];
  static_assert(kStored.at == kWhole || kStored.at % (8 * static_cast<int>(kStored.bytes)) == 0);
  StoreRow<V, kStored.bytes, kStored.at == kWhole ? 0 : kStored.at / 8>(row, words, where);
}

// The first `count` elements of a row.
template <class V>
BALLAST_FN typename V::M Inside(uint64_t count, int j) {
  return V::GreaterBits(V::SetBits(static_cast<uint32_t>(count)),
                        V::AddBits(V::Position(), V::SetBits(static_cast<uint32_t>(j))));
}

template <class V>
BALLAST_FN typename V::U MagnitudeOf(typename V::F x) {
  return V::And(V::Bits(x), V::SetBits(kMagnitude));
}

// A moment's decoder for the thread's block.
template <class V, class S>
BALLAST_FN auto DecoderOf(typename V::U scale) {
  using D = typename S::template Decoder<V>;
  if constexpr (D::kNumbers > 0) {
    return D::Of(scale);
  } else {
    return D{};
  }
}

// The largest over the threads of a block, over a row; as signed integers.
template <class V>
BALLAST_FN typename V::U OverBlock(typename V::U x) {
  static_assert(kBlockThreads == 4);
  x = V::MaxBits(x, V::template Exchange<1>(x));
  return V::MaxBits(x, V::template Exchange<2>(x));
}
template <class V>
BALLAST_FN typename V::U OverRow(typename V::U x) {
  x = OverBlock<V>(x);
  x = V::MaxBits(x, V::template Exchange<4>(x));
  x = V::MaxBits(x, V::template Exchange<8>(x));
  return V::MaxBits(x, V::template Exchange<16>(x));
}

// Words of a payload as a row of gradients: decoded, times `scale`; past `count` they are +0, whatever was read.
template <class V, class Wire>
BALLAST_FN void DecodeRow(const typename V::U* packed, float scale, uint64_t count, typename V::F (&out)[kEach]) {
  typename V::U words[kEach];
  Unpack<V, Wire::kBytes, false>(packed, words);
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = V::Mul(Wire::template Decode<V>(words[j]), V::Set(scale));
  if (count >= kRow) return;
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = V::Select(Inside<V>(count, j), out[j], V::Set(0.0f));
}

// Whether each element is infinite or NaN; `magnitude`: the bits of its absolute value.
template <class V>
BALLAST_FN typename V::M NotFinite(typename V::U magnitude) {
  return V::GreaterBits(magnitude, V::SetBits(kInfinityBits - 1));
}

// A thread's gradients: the largest magnitude; where one is not finite, how many are not, and the largest of the rest.
template <class V>
struct GradientRange {
  typename V::U most, nonfinite, largest_finite;
};
template <class V>
BALLAST_FN GradientRange<V> RangeOf(const typename V::F (&grad)[kEach]) {
  GradientRange<V> range{V::SetBits(0), V::SetBits(0), V::SetBits(0)};
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) range.most = V::MaxBits(range.most, MagnitudeOf<V>(grad[j]));
  range.largest_finite = range.most;
  if (!V::Any(NotFinite<V>(range.most))) return range;
  range.largest_finite = V::SetBits(0);
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
    const auto magnitude = MagnitudeOf<V>(grad[j]);
    range.nonfinite = V::IncrementIf(NotFinite<V>(magnitude), range.nonfinite);
    range.largest_finite =
        V::MaxBits(range.largest_finite, V::SelectBits(NotFinite<V>(magnitude), V::SetBits(0), magnitude));
  }
  return range;
}

// Calls act.operator()<Wire>() for the format with this index.
template <class Act, class... Wires>
BALLAST_FN void WithWire(WireIndex index, List<Wires...>, Act&& act) {
  int i = 0;
  ((i++ == index ? act.template operator()<Wires>() : void()), ...);
}

// Of an element of the format with this index.
template <class... Wires>
BALLAST_FN uint32_t WireBytesOf(WireIndex index, List<Wires...>) {
  uint32_t bytes = 0;
  int i = 0;
  ((bytes = i++ == index ? Wires::kBytes : bytes), ...);
  return bytes;
}

// 256 numbers of a row, or sums over a tile, in `lanes`, which no other warp touches; sums are in TileSum's order.
template <class V>
class WarpSum {
 public:
  using Values = typename V::F[kEach];
  BALLAST_FN explicit WarpSum(float* lanes) : lanes_(reinterpret_cast<std::byte*>(lanes)) {}

  BALLAST_FN void Set(const Values& values) {
    typename V::U bits[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) bits[j] = V::Bits(values[j]);
    V::StoreOwn(lanes_, bits, All());
  }
  BALLAST_FN void Get(Values& values) const {
    typename V::U bits[kEach];
    V::LoadOwn(lanes_, bits);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) values[j] = V::FromBits(bits[j]);
  }
  BALLAST_FN void Clear() { ClearWhere(All()); }
  BALLAST_FN void ClearWhere(typename V::M where) {
    typename V::U zeros[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) zeros[j] = V::SetBits(0);
    V::StoreOwn(lanes_, zeros, where);
  }
  // What lies past `count` becomes 0.
  BALLAST_FN void Keep(uint64_t count) {
    Values values;
    Get(values);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      values[j] = V::Select(Inside<V>(count, j), values[j], V::Set(0.0f));
    }
    Set(values);
  }
  BALLAST_FN void Add(const Values& terms) {
    Values sums;
    Get(sums);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) sums[j] = V::Add(sums[j], terms[j]);
    Set(sums);
  }
  BALLAST_FN typename V::F Total() const {
    Values sums;
    Get(sums);
    BALLAST_UNROLL for (int width = kEach / 2; width > 0; width /= 2) {
      BALLAST_UNROLL for (int j = 0; j < width; ++j) sums[j] = V::Add(sums[2 * j], sums[2 * j + 1]);
    }
    auto sum = AddOther<1>(sums[0]);
    sum = AddOther<2>(sum);
    sum = AddOther<4>(sum);
    sum = AddOther<8>(sum);
    return AddOther<16>(sum);
  }

 private:
  static BALLAST_FN typename V::M All() { return V::EqualBits(V::SetBits(0), V::SetBits(0)); }
  template <int kMask>
  static BALLAST_FN typename V::F AddOther(typename V::F x) {
    return V::Add(x, V::FromBits(V::template Exchange<kMask>(V::Bits(x))));
  }
  std::byte* lanes_;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
