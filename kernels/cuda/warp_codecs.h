// Loading and serving of masters on a GPU: a warp works on 256 elements at a time. Written over a warp's vector type
// (simd/warp.h); the bits are those of cpu_codecs.h. `first` is a multiple of kBlock; payloads are 16-byte aligned and
// have room for whole rows of 256 elements.
#pragma once

#include "kernels/cuda/warp_row.h"
#include "kernels/math/average.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <class V, class Format>
struct WarpCodec {
  using F = typename V::F;
  using U = typename V::U;
  using M = typename V::M;
  static constexpr bool kTwo = std::size(Format::kPlanes) == 2;

  // Whether all of `count` elements from `in` are finite.
  template <class Wire>
  static BALLAST_FN bool FiniteRow(const std::byte* in, uint64_t count) {
    F values[kEach];
    Read<Wire>(in, count, values);
    auto most = V::SetBits(0);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) most = V::MaxBits(most, MagnitudeOf<V>(values[j]));
    return !V::Any(V::GreaterBits(most, V::SetBits(kInfinityBits - 1)));
  }

  // Decodes `count` elements from `in` into [first, first + count), and zeros to the end of the last block.
  template <class Wire>
  static BALLAST_FN void LoadRow(std::byte* const* planes, const std::byte* in, uint64_t first, uint64_t count) {
    F values[kEach];
    Read<Wire>(in, count, values);
    U words[2][kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      const auto w = Format::template Encode<V, false>(Saturated(values[j]), V::SetBits(0));
      words[0][j] = w.word[0];
      if constexpr (kTwo) words[1][j] = w.word[1];
    }
    const auto where = InBlocks(count);
    StorePlane<V, Format, 0>(At<0>(planes, first), words[0], where);
    if constexpr (kTwo) StorePlane<V, Format, 1>(At<1>(planes, first), words[1], where);
  }

  // Moves [first, first + count) of an average, and what is left of the last block.
  static BALLAST_FN void AverageRow(const Average& average, uint64_t first, uint64_t count) {
    using Averages = WarpCodec<V, AverageFormat>;
    const auto where = InBlocks(count);
    U weights[2][kEach], words[2][kEach];
    LoadMaster(average.weights, first, where, weights);
    if (average.begins) {
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
        Averages::Put(AverageBegun<V>(Format::template Decode<V>(At(weights, j))), j, words);
      }
    } else {
      Averages::LoadMaster(average.planes, first, where, words);
      const RandomStream<V> stream(average.random_key, first);
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
        const auto w = Format::template Decode<V>(At(weights, j));
        const auto a = AverageFormat::template Decode<V>(Averages::At(words, j));
        const auto random = stream.At(first + static_cast<uint64_t>(j));
        Averages::Put(AverageMoved<V>(a, w, average.pull, stream, random), j, words);
      }
    }
    StorePlane<V, AverageFormat, 0>(Averages::template At<0>(average.planes, first), words[0], where);
    StorePlane<V, AverageFormat, 1>(Averages::template At<1>(average.planes, first), words[1], where);
  }

  // Encodes [first, first + 256), or to `last`, at `out`. Scales as in MasterFormat::encode_weights.
  template <class Wire>
  static BALLAST_FN void EncodeRow(std::byte* const* planes, const float* scales, uint64_t row_length, std::byte* out,
                                   uint64_t first, uint64_t last) {
    const auto where = Inside<V>(last - first < kRow ? last - first : kRow, 0);
    U words[2][kEach];
    LoadMaster(planes, first, where, words);
    F scale[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) scale[j] = V::Set(1.0f);
    if constexpr (Wire::kScaling != Scaling::kNone) V::LoadScales(scales, row_length, first, last, scale);
    U served[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      if constexpr (Format::kPlanes[0].bytes == 2 && std::is_same_v<Wire, WireBf16>) {
        served[j] = words[0][j];
      } else {
        served[j] = Wire::template Encode<V>(Format::template Decode<V>(At(words, j)), scale[j]);
      }
    }
    StoreRow<V, Wire::kBytes>(out, served, where);
  }

  // Raises each row's scale to the largest magnitude of its elements in [first, first + 256), or to `last`.
  static BALLAST_FN void RaiseRow(std::byte* const* planes, float* scales, uint64_t row_length, uint64_t first,
                                  uint64_t last) {
    U words[2][kEach], magnitude[kEach];
    LoadMaster(planes, first, Inside<V>(last - first < kRow ? last - first : kRow, 0), words);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) magnitude[j] =
        MagnitudeOf<V>(Format::template Decode<V>(At(words, j)));
    V::Raise(scales, row_length, first, last, magnitude);
  }

 private:
  template <class, class>
  friend struct WarpCodec;

  // The threads whose blocks have one of the first `count` elements of a row.
  static BALLAST_FN M InBlocks(uint64_t count) {
    const auto begin = V::And(V::Position(), V::SetBits(~(static_cast<uint32_t>(kBlock) - 1)));
    return V::GreaterBits(V::SetBits(static_cast<uint32_t>(count)), begin);
  }
  template <int kPlane>
  static BALLAST_FN std::byte* At(std::byte* const* planes, uint64_t first) {
    return planes[kPlane] + first * Format::kPlanes[kPlane].bytes;
  }
  static BALLAST_FN Words<V> At(const U (&words)[2][kEach], int j) {
    Words<V> w{};
    w.word[0] = words[0][j];
    if constexpr (kTwo) w.word[1] = words[1][j];
    return w;
  }
  static BALLAST_FN void Put(const Words<V>& w, int j, U (&words)[2][kEach]) {
    words[0][j] = w.word[0];
    words[1][j] = w.word[1];
  }
  template <class Wire>
  static BALLAST_FN void Read(const std::byte* in, uint64_t count, F (&values)[kEach]) {
    U packed[WordsEach(Wire::kBytes)];
    V::LoadVector(in, packed);
    DecodeRow<V, Wire>(packed, 1, count, values);
  }
  static BALLAST_FN void LoadMaster(std::byte* const* planes, uint64_t first, M where, U (&words)[2][kEach]) {
    LoadPlane<0>(planes, first, where, words[0]);
    if constexpr (kTwo) LoadPlane<1>(planes, first, where, words[1]);
  }
  template <int kPlane>
  static BALLAST_FN void LoadPlane(std::byte* const* planes, uint64_t first, M where, U (&words)[kEach]) {
    constexpr StoredPlane kStored = Format::kPlanes[kPlane];
    U packed[WordsEach(kStored.bytes)];
    V::LoadVector(At<kPlane>(planes, first), packed, where);
    Unpack<V, kStored.bytes, kStored.sign>(packed, words);
  }
  static BALLAST_FN F Saturated(F x) {
    const auto magnitude = V::MinBits(MagnitudeOf<V>(x), V::SetBits(Format::kSaturated));
    return V::FromBits(V::Or(magnitude, V::And(V::Bits(x), V::SetBits(kSignBit))));
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
