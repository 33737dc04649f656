// The formats by themselves on CPUs: loading and serving of masters, encoding and decoding of moments.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_rows.h"
#include "kernels/layout.h"
#include "kernels/lists.h"
#include "kernels/math/average.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <class V, class Format, class WireFormats>
struct MasterCodec {
  static constexpr auto kPlanes = MasterPlanes<Format>();

  template <class Wire>
  static bool LoadFrom(std::byte* const* planes, const void* in, uint64_t first, uint64_t last) {
    const std::byte* payload = static_cast<const std::byte*>(in);
    alignas(64) float row[kRow];
    for (uint64_t e = 0; e < last - first; e += kRow) {
      if (DecodePayload<V, Wire>(payload, e, std::min(kRow, last - first - e), 1, row) >= kInfinityBits) return false;
    }
    for (uint64_t e = 0; e < last - first; e += kRow) {
      const uint64_t count = std::min(kRow, last - first - e);
      DecodePayload<V, Wire>(payload, e, count, 1, row);
      for (uint64_t i = 0; i < count; i += kBlock) StoreWeights(planes, first + e + i, row + i);
    }
    return true;
  }
  static void StoreWeights(std::byte* const* planes, uint64_t first, const float* values) {
    BlockWords<V> words[2];
    for (int j = 0; j < kVectors<V>; ++j) {
      const auto x = Saturated(V::Load(values + j * V::kWidth));
      const auto w = Format::template Encode<V, false>(x, V::SetBits(0));
      words[0][j] = w.word[0];
      if constexpr (kPlanes.size() == 2) words[1][j] = w.word[1];
    }
    StoreBlock<V, Format, 0>(planes[0], first, words[0]);
    if constexpr (kPlanes.size() == 2) StoreBlock<V, Format, 1>(planes[1], first, words[1]);
  }

  static typename V::F Saturated(typename V::F x) {
    const auto bits = V::Bits(x);
    const auto magnitude = V::MinBits(V::And(bits, V::SetBits(kMagnitude)), V::SetBits(Format::kSaturated));
    return V::FromBits(V::Or(magnitude, V::And(bits, V::SetBits(kSignBit))));
  }

  template <class Wire>
  static void ServeAs(const std::byte* const* planes, const float* scales, uint64_t row_length, void* out,
                      uint64_t first, uint64_t last) {
    std::byte* to = static_cast<std::byte*>(out);
    for (uint64_t block = first; block < last; block += kBlock, to += kBlock * Wire::kBytes) {
      alignas(64) float scale[kBlock] = {};
      if constexpr (Wire::kScaling != Scaling::kNone) SpreadScales(scales, row_length, block, last, scale);
      BlockWords<V> words;
      for (int j = 0; j < kVectors<V>; ++j) {
        const uint64_t i = static_cast<uint64_t>(j) * V::kWidth;
        words[j] = EncodeOne<Wire>(LoadMaster<V, Format>(planes, block + i), V::Load(scale + i));
      }
      if (last - block >= kBlock) {
        StorePayload<Wire>(to, words);
      } else {
        std::byte whole[kBlock * Wire::kBytes];
        StorePayload<Wire>(whole, words);
        std::memcpy(to, whole, (last - block) * Wire::kBytes);
      }
    }
  }
  template <class Wire>
  static void StorePayload(std::byte* to, const BlockWords<V>& words) {
    if constexpr (Wire::kSigned) {
      V::template StoreFields<Wire::kBytes, 0>(to, words);
    } else {
      V::template StoreWords<Wire::kBytes>(to, words);
    }
  }
  // A master whose first plane is bf16 is served in bf16 as it is.
  template <class Wire>
  static typename V::U EncodeOne(const Words<V>& w, typename V::F scale) {
    if constexpr (kPlanes[0].bytes == 2 && std::is_same_v<Wire, WireBf16>) {
      return w.word[0];
    } else {
      return Wire::template Encode<V>(Format::template Decode<V>(w), scale);
    }
  }
  static void SpreadScales(const float* scales, uint64_t row_length, uint64_t block, uint64_t last, float* out) {
    const uint64_t end = std::min(last, block + kBlock);
    if (block / row_length == (end - 1) / row_length) {
      std::fill_n(out, kBlock, scales[block / row_length]);
    } else {
      for (uint64_t e = block; e < end; ++e) out[e - block] = scales[e / row_length];
    }
  }

  static float AbsMax(const std::byte* const* planes, uint64_t first, uint64_t last) {
    uint32_t most = 0;
    for (uint64_t block = first / kBlock * kBlock; block < last; block += kBlock) {
      alignas(64) float values[kBlock];
      for (int j = 0; j < kVectors<V>; ++j) {
        const uint64_t i = static_cast<uint64_t>(j) * V::kWidth;
        V::Store(values + i, Format::template Decode<V>(LoadMaster<V, Format>(planes, block + i)));
      }
      for (uint64_t e = std::max(first, block); e < std::min(last, block + kBlock); ++e) {
        most = std::max(most, std::bit_cast<uint32_t>(values[e - block]) & kMagnitude);
      }
    }
    return std::bit_cast<float>(most);
  }

  static void MoveAverage(const Average& given, uint64_t first, uint64_t last) {
    const Average average = given;  // a copy, whose neighbours nobody else writes to
    const uint64_t end = std::min(average.n, last * kTile);
    for (uint64_t row = first * kTile; row < end; row += kRow) {
      const RandomStream<V> stream(average.random_key, row);
      for (uint64_t block = row; block < std::min(end, row + kRow); block += kBlock) {
        average.begins ? BeginAverageBlock(average, block) : MoveAverageBlock(average, stream, block);
      }
    }
  }
  static void BeginAverageBlock(const Average& average, uint64_t block) {
    StoreAverage(average, block, [&](uint64_t e) {
      return AverageBegun<V>(Format::template Decode<V>(LoadMaster<V, Format>(average.weights, e)));
    });
  }
  static void MoveAverageBlock(const Average& average, const RandomStream<V>& stream, uint64_t block) {
    StoreAverage(average, block, [&](uint64_t e) {
      const auto w = Format::template Decode<V>(LoadMaster<V, Format>(average.weights, e));
      const auto a = AverageFormat::template Decode<V>(LoadMaster<V, AverageFormat>(average.planes, e));
      return AverageMoved<V>(a, w, average.pull, stream, stream.At(e));
    });
  }
  // `words_of`: of the elements of a vector from one on.
  template <class WordsOf>
  static void StoreAverage(const Average& average, uint64_t block, WordsOf words_of) {
    BlockWords<V> words[2];
    for (int j = 0; j < kVectors<V>; ++j) {
      const Words<V> w = words_of(block + static_cast<uint64_t>(j) * V::kWidth);
      words[0][j] = w.word[0];
      words[1][j] = w.word[1];
    }
    StoreBlock<V, AverageFormat, 0>(average.planes[0], block, words[0]);
    StoreBlock<V, AverageFormat, 1>(average.planes[1], block, words[1]);
  }

  static bool Load(std::byte* const* planes, WireIndex format, const void* in, uint64_t first, uint64_t last) {
    return [&]<class... Wires>(List<Wires...>) {
      constexpr bool (*kLoaders[])(std::byte* const*, const void*, uint64_t, uint64_t) = {Loader<Wires>()...};
      return kLoaders[format](planes, in, first, last);
    }(WireFormats{});
  }
  static void EncodeWeights(const std::byte* const* planes, WireIndex format, const float* scales, uint64_t row_length,
                            void* out, uint64_t first, uint64_t last) {
    [&]<class... Wires>(List<Wires...>) {
      constexpr void (*kServers[])(const std::byte* const*, const float*, uint64_t, void*, uint64_t,
                                   uint64_t) = {Server<Wires>()...};
      kServers[format](planes, scales, row_length, out, first, last);
    }(WireFormats{});
  }
  // nullptr if the format is not fit for that; callers ask WireFormat first.
  template <class Wire>
  static constexpr auto Loader() -> bool (*)(std::byte* const*, const void*, uint64_t, uint64_t) {
    if constexpr (Wire::kGradient) {
      return &LoadFrom<Wire>;
    } else {
      return nullptr;
    }
  }
  template <class Wire>
  static constexpr auto Server()
      -> void (*)(const std::byte* const*, const float*, uint64_t, void*, uint64_t, uint64_t) {
    if constexpr (Wire::kServing) {
      return &ServeAs<Wire>;
    } else {
      return nullptr;
    }
  }
};

template <class V, class Wire>
void AccumulatePayload(float* sum, const void* in, uint64_t n, bool first) {
  const std::byte* payload = static_cast<const std::byte*>(in);
  alignas(64) float row[kRow];
  for (uint64_t e = 0; e < n; e += kRow) {
    const uint64_t count = std::min(kRow, n - e);
    DecodePayload<V, Wire>(payload, e, count, 1, row);
    for (uint64_t i = 0; i < count; ++i) sum[e + i] = first ? row[i] : sum[e + i] + row[i];
  }
}

// Measures a gradient in one tile.
template <class V, class Wire>
TileStatistics MeasureTile(const std::byte* in, uint64_t n, float scale, uint64_t tile) {
  TileStatistics out{};
  TileSum squares;
  alignas(64) float row[kRow];
  const uint64_t end = std::min(n, (tile + 1) * kTile);
  for (uint64_t first = tile * kTile; first < end; first += kRow) {
    const uint64_t count = std::min(kRow, end - first);
    uint32_t largest = DecodePayload<V, Wire>(in, first, count, scale, row);
    if (largest >= kInfinityBits) {
      const NonFinite found = FindNonFinite(row, count);
      out.nonfinite += found.count;
      largest = found.largest;
      for (uint64_t b = 0; b < kRowBlocks; ++b) {
        if (found.blocks[b]) std::fill_n(row + b * kBlock, kBlock, 0.0f);
      }
    }
    out.grad_absmax = std::max(out.grad_absmax, std::bit_cast<float>(largest));
    for (uint64_t i = 0; i < kRow; i += V::kWidth) {
      const auto g = V::Load(row + i);
      squares.template Add<V>(i, V::Mul(g, g));
    }
  }
  out.grad_sq = squares.Total();
  return out;
}
template <class V, class Wire>
void MeasurePayload(const void* in, uint64_t n, float scale, uint64_t first, uint64_t last, TileStatistics* stats) {
  const std::byte* payload = static_cast<const std::byte*>(in);
  for (uint64_t tile = first; tile < last; ++tile) stats[tile - first] = MeasureTile<V, Wire>(payload, n, scale, tile);
}

// kVariance: values are v, so none may be negative, and a format that stores roots gets their roots.
template <class V, class S, bool kVariance>
struct CpuMomentCodec {
  static constexpr auto kPlanes = MomentPlanes<S>(kVariance ? 1 : 0);

  // A NaN is not acceptable, since it compares false.
  static bool Acceptable(float x) { return x <= kLargestValue<S> && x >= (kVariance ? 0 : -kLargestValue<S>); }

  template <bool kStochastic>
  static void EncodeRow(std::byte* const* planes, const float* row, uint64_t first, uint64_t key) {
    RowEncoder<V, S> encoder;
    encoder.Store(kernels::Largest<V>(row), planes, first);
    alignas(64) uint32_t random[kRow];
    if constexpr (kStochastic) RandomStream<V>(key, first).Fill(first, kRow, random);
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      const uint64_t e = first + b * kBlock;
      EncodeMomentBlock<V, S, kStochastic>(encoder.At(b), row + b * kBlock, random + b * kBlock, planes[0], e);
    }
  }
  static bool Encode(std::byte* const* planes, const float* in, uint64_t n, uint64_t key, bool stochastic) {
    if (!std::all_of(in, in + n, Acceptable)) return false;
    for (uint64_t first = 0; first < n; first += kRow) {
      alignas(64) float row[kRow] = {};
      for (uint64_t i = 0; i < std::min(kRow, n - first); ++i) {
        row[i] = S::kStoresRoot ? std::sqrt(in[first + i]) : in[first + i];
      }
      stochastic ? EncodeRow<true>(planes, row, first, key) : EncodeRow<false>(planes, row, first, key);
    }
    return true;
  }
  static void Decode(const std::byte* const* planes, float* out, uint64_t n) {
    for (uint64_t first = 0; first < n; first += kRow) {
      RowDecoder<V, S> decoder;
      decoder.Load(0, planes, first);
      alignas(64) float row[kRow];
      for (uint64_t i = 0; i < kRow; i += V::kWidth) {
        V::Store(row + i, decoder.At(i / kBlock).Decode(LoadWords<V, S, 0>(planes[0], first + i)));
      }
      std::copy_n(row, std::min(kRow, n - first), out + first);
    }
  }
  static constexpr MomentCodec Table() { return {kPlanes, kLargestValue<S>, &Encode, &Decode}; }
};

// The codec of a v of two components, which is that of the master of that kind.
template <class V, class Master>
struct PairCodec {
  static constexpr std::array<Plane, 2> kPlanes = {
      Plane{kMomentPlaneNames[1][0], PlaneKind::kVariance, Master::kPlanes[0].bytes, 1},
      Plane{kMomentPlaneNames[2][0], PlaneKind::kVariance, Master::kPlanes[1].bytes, 1}};
  using Codec = MasterCodec<V, Master, List<WireFp32>>;

  static bool Encode(std::byte* const* planes, const float* in, uint64_t n, uint64_t, bool) {
    return std::all_of(in, in + n, [](float x) { return x >= 0; }) && Codec::Load(planes, 0, in, 0, n);
  }
  static void Decode(const std::byte* const* planes, float* out, uint64_t n) {
    Codec::EncodeWeights(planes, 0, nullptr, n, out, 0, n);
  }
  static constexpr MomentCodec Table() { return {kPlanes, std::bit_cast<float>(kLargestFiniteBits), &Encode, &Decode}; }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
