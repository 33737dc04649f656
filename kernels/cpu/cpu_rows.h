// The parts of the CPU driver and the codecs: rows of 256 elements, or eight blocks, that stay in the first-level cache
// between passes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "kernels/formats/format.h"
#include "kernels/formats/wire.h"
#include "kernels/math/random.h"
#include "kernels/math/statistics.h"
#include "kernels/registry.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr uint64_t kRowBlocks = kRow / kBlock;
inline constexpr uint64_t kRowBlocksRoom = 16;  // a whole vector of the widest kind
static_assert(kRow == kPad);                    // a row is always whole in memory

template <class V>
inline constexpr int kVectors = static_cast<int>(kBlock) / V::kWidth;  // a block
template <class V>
using BlockWords = typename V::U[kVectors<V>];

// A 32-bit figure for each block of a row, side by side in as few vectors as hold them.
template <class V>
struct RowBlocks {
  static constexpr int kCount = std::max(static_cast<int>(kRowBlocks) / V::kWidth, 1);
  typename V::U of[kCount];
};

// How far ahead of the row in hand memory is asked for: a processor's own prefetching ends at each page of each plane.
inline constexpr uint64_t kAhead = 4 * kRow;

// Has the cache load `bytes` bytes, which may lie past the end of an array.
inline void Prefetch(const std::byte* at, uint64_t bytes) {
  constexpr uint64_t kLine = 64;
  for (uint64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(at + i);
}

// |x|, as bits.
template <class V>
inline typename V::U Magnitude(typename V::F x) {
  return V::Bits(V::Abs(x));
}

// The words of one vector of a plane that starts at `plane`, from element `first` on.
template <class V, class Format, int kPlane>
inline typename V::U LoadWords(const std::byte* plane, uint64_t first) {
  constexpr StoredPlane kStored = Format::kPlanes[kPlane];
  return V::template LoadWords<kStored.bytes, kStored.sign>(plane + first * kStored.bytes);
}

template <class V, class Master>
inline Words<V> LoadMaster(const std::byte* const* planes, uint64_t first) {
  Words<V> w{};
  w.word[0] = LoadWords<V, Master, 0>(planes[0], first);
  if constexpr (std::size(Master::kPlanes) == 2) w.word[1] = LoadWords<V, Master, 1>(planes[1], first);
  return w;
}

// One block of a plane.
template <class V, class Format, int kPlane>
inline void StoreBlock(std::byte* plane, uint64_t first, const BlockWords<V>& words) {
  constexpr StoredPlane kStored = Format::kPlanes[kPlane];
  std::byte* const to = plane + first * kStored.bytes;
  if constexpr (kStored.at == kWhole) {
    V::template StoreWords<kStored.bytes>(to, words);
  } else {
    V::template StoreFields<kStored.bytes, kStored.at>(to, words);
  }
}

// The scales of the row's blocks, and back.
template <class V, class S>
inline RowBlocks<V> LoadScales(const std::byte* plane, uint64_t first) {
  constexpr uint32_t kBytes = S::kPlanes[1].bytes;
  const std::byte* at = plane + first / S::kScalePer * kBytes;
  RowBlocks<V> scales;
  if constexpr (S::kScalePer == kRow) {
    uint32_t scale = 0;
    std::memcpy(&scale, at, kBytes);
    std::fill_n(scales.of, scales.kCount, V::SetBits(scale));
  } else {
    static_assert(S::kScalePer == kBlock && kBytes == 2);
    V::LoadEight(at, scales.of);
  }
  return scales;
}
template <class V, class S>
inline void StoreScales(std::byte* plane, uint64_t first, const RowBlocks<V>& scales) {
  constexpr uint32_t kBytes = S::kPlanes[1].bytes;
  std::byte* const at = plane + first / S::kScalePer * kBytes;
  if constexpr (S::kScalePer == kRow) {
    const uint32_t scale = V::Largest(scales.of[0]);
    std::memcpy(at, &scale, kBytes);
  } else {
    V::StoreEight(at, scales.of);
  }
}

// A moment's Decoders or Encoders for the blocks of some rows: made for a row's blocks at once, used for one at a time.
template <class V, template <class> class Coder, uint64_t kRows = 1>
class RowCoder {
 public:
  // For the blocks of row number `row`.
  template <class... Blocks>
  void Make(uint64_t row, const Blocks&... blocks) {
    if constexpr (Coder<V>::kNumbers > 0) {
      for (int b = 0; b < RowBlocks<V>::kCount; ++b) {
        const auto made = Coder<V>::Of(blocks.of[b]...);
        for (int i = 0; i < Coder<V>::kNumbers; ++i) {
          V::Store(number_[i] + row * kRowBlocks + static_cast<uint64_t>(b) * V::kWidth, made.number[i]);
        }
      }
    }
  }
  Coder<V> At(uint64_t block) const {
    Coder<V> coder;
    if constexpr (Coder<V>::kNumbers > 0) {
      for (int i = 0; i < Coder<V>::kNumbers; ++i) coder.number[i] = V::Set(number_[i][block]);
    }
    return coder;
  }

 private:
  static constexpr uint64_t kRoom = 16;  // what a vector of the widest kind writes
  alignas(64) float number_[std::max(Coder<V>::kNumbers, 1)][(kRows - 1) * kRowBlocks + kRoom];
};

template <class V, class S, uint64_t kRows = 1>
struct RowDecoder : RowCoder<V, S::template Decoder, kRows> {
  // For row number `row`, which begins at element `first` of the planes.
  void Load(uint64_t row, const std::byte* const* planes, uint64_t first) {
    if constexpr (S::kScalePer > 0) this->Make(row, LoadScales<V, S>(planes[1], first));
  }
};

// Computes the scales from the blocks' largest magnitudes, and stores them.
template <class V, class S>
struct RowEncoder : RowCoder<V, S::template Encoder> {
  void Store(RowBlocks<V> most, std::byte* const* planes, uint64_t first) {
    if constexpr (S::kScalePer > 0) {
      if constexpr (S::kScalePer == kRow) {
        uint32_t largest = 0;
        for (const auto blocks : most.of) largest = std::max(largest, V::Largest(blocks));
        std::fill_n(most.of, most.kCount, V::SetBits(largest));
      }
      RowBlocks<V> scales;
      for (int b = 0; b < scales.kCount; ++b) scales.of[b] = S::template Scale<V>(most.of[b]);
      StoreScales<V, S>(planes[1], first, scales);
      this->Make(0, scales, most);
    }
  }
};

// One block of a moment; `random`: a random word for each of its elements.
template <class V, class S, bool kStochastic>
inline void EncodeMomentBlock(const typename S::template Encoder<V>& encoder, const float* values,
                              const uint32_t* random, std::byte* plane, uint64_t first) {
  BlockWords<V> words;
  for (int j = 0; j < kVectors<V>; ++j) {
    const auto bits = kStochastic ? V::LoadBits(random + j * V::kWidth) : V::SetBits(0);
    words[j] = encoder.template Encode<kStochastic>(V::Load(values + j * V::kWidth), bits);
  }
  StoreBlock<V, S, 0>(plane, first, words);
}

// The largest magnitude of each block of a row, as bits.
template <class V>
inline RowBlocks<V> Largest(const float* row) {
  alignas(64) uint32_t vectors[kRowBlocks * V::kWidth];
  for (uint64_t b = 0; b < kRowBlocks; ++b) {
    auto block = V::SetBits(0);
    for (int j = 0; j < kVectors<V>; ++j) {
      const auto x = V::Load(row + b * kBlock + static_cast<uint64_t>(j) * V::kWidth);
      block = V::MaxBits(block, Magnitude<V>(x));
    }
    V::StoreBits(vectors + b * V::kWidth, block);
  }
  RowBlocks<V> most;
  V::LargestOfEight(vectors, most.of);
  return most;
}

// Decodes elements [first, first + count) of a payload, count <= 256, times `scale`; the rest of the row becomes +0.
// Returns the largest magnitude, as bits.
template <class V, class Wire>
inline uint32_t DecodePayload(const std::byte* in, uint64_t first, uint64_t count, float scale, float* row) {
  alignas(64) std::byte padded[kRow * Wire::kBytes];
  const std::byte* words = in + first * Wire::kBytes;
  if (count < kRow) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, words, count * Wire::kBytes);
    words = padded;
  }
  Prefetch(in + (first + kAhead) * Wire::kBytes, kRow * Wire::kBytes);
  auto most = V::SetBits(0);
  for (uint64_t i = 0; i < kRow; i += V::kWidth) {
    const auto word = V::template LoadWords<Wire::kBytes, false>(words + i * Wire::kBytes);
    const auto x = V::Mul(Wire::template Decode<V>(word), V::Set(scale));
    V::Store(row + i, x);
    most = V::MaxBits(most, Magnitude<V>(x));
  }
  std::fill(row + count, row + kRow, 0.0f);  // even where the scale is not finite
  return V::Largest(most);
}

// A function that decodes a row of gradients: DecodePayload for some format.
using GradientLoader = uint32_t (*)(const std::byte*, uint64_t, uint64_t, float, float*);

// The loader for a gradient's format.
template <class V, class Wires>
struct GradientLoaders;
template <class V, template <class...> class ListOf, class... Wires>
struct GradientLoaders<V, ListOf<Wires...>> {
  static GradientLoader Of(WireIndex format) {
    constexpr GradientLoader kLoaders[] = {&LoadAs<Wires>...};
    return kLoaders[format];
  }
  template <class Wire>
  static uint32_t LoadAs(const std::byte* in, uint64_t first, uint64_t count, float scale, float* row) {
    if constexpr (Wire::kGradient) return DecodePayload<V, Wire>(in, first, count, scale, row);
    return kInfinityBits;  // never a gradient's format; callers ask WireFormat first
  }
};

// Multiplies a row of gradients and returns the largest magnitude after it, as bits. What lies past the tensor's end
// stays +0.
template <class V>
inline uint32_t ClipRow(float clip, float* row) {
  auto largest = V::SetBits(0);
  for (uint64_t i = 0; i < kRow; i += V::kWidth) {
    const auto x = V::Mul(V::Load(row + i), V::Set(clip));
    V::Store(row + i, x);
    largest = V::MaxBits(largest, Magnitude<V>(x));
  }
  return V::Largest(largest);
}

// The elements of a row of gradients that are not finite.
struct NonFinite {
  uint32_t count = 0;
  std::array<bool, kRowBlocks> blocks = {};  // that have one
  uint32_t largest = 0;                      // magnitude of the others, as bits
};
inline NonFinite FindNonFinite(const float* row, uint64_t count) {
  NonFinite found;
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(row[i]) & kMagnitude;
    if (magnitude < kInfinityBits) {
      found.largest = std::max(found.largest, magnitude);
    } else {
      ++found.count;
      found.blocks[i / kBlock] = true;
    }
  }
  return found;
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
