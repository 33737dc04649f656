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
inline constexpr uint64_t kRowBlocksRoom = 16;  // a whole lane of the widest kind
static_assert(kRow == kPad);                    // a row is always whole in memory

template <class L>
inline constexpr int kVectors = static_cast<int>(kBlock) / L::kWidth;  // lanes a block
template <class L>
using BlockWords = typename L::U[kVectors<L>];

// One 32-bit figure for each block of a row.
struct RowBlocks {
  alignas(64) uint32_t of[kRowBlocksRoom] = {};
};

// The words of one lane of a plane that starts at `plane`, from element `first` on.
template <class L, class Format, int kPlane>
inline typename L::U LoadWords(const std::byte* plane, uint64_t first) {
  constexpr StoredPlane kStored = Format::kPlanes[kPlane];
  return L::template LoadWords<kStored.bytes, kStored.sign>(plane + first * kStored.bytes);
}

template <class L, class Master>
inline Words<L> LoadMaster(const std::byte* const* planes, uint64_t first) {
  Words<L> w{};
  w.word[0] = LoadWords<L, Master, 0>(planes[0], first);
  if constexpr (std::size(Master::kPlanes) == 2) w.word[1] = LoadWords<L, Master, 1>(planes[1], first);
  return w;
}

// One block of a plane.
template <class L, class Format, int kPlane>
inline void StoreBlock(std::byte* plane, uint64_t first, const BlockWords<L>& words) {
  constexpr StoredPlane kStored = Format::kPlanes[kPlane];
  L::template StoreWords<kStored.bytes, kStored.sign>(plane + first * kStored.bytes, words);
}

// The scales of the row's blocks, and back.
template <class S>
inline void LoadScales(const std::byte* plane, uint64_t first, RowBlocks* scales) {
  constexpr uint32_t kBytes = S::kPlanes[1].bytes;
  for (uint64_t b = 0; b < kRowBlocks; ++b) {
    std::memcpy(&scales->of[b], plane + (first + b * kBlock) / S::kScalePer * kBytes, kBytes);
  }
}
template <class S>
inline void StoreScales(std::byte* plane, uint64_t first, const RowBlocks& scales) {
  constexpr uint32_t kBytes = S::kPlanes[1].bytes;
  for (uint64_t b = 0; b < kRowBlocks; b += S::kScalePer / kBlock) {
    std::memcpy(plane + (first + b * kBlock) / S::kScalePer * kBytes, &scales.of[b], kBytes);
  }
}

// A slot's Decoders or Encoders for the blocks of a row: made for many blocks at once, used for one at a time.
template <class L, template <class> class Coder>
class RowCoder {
 public:
  template <class... Blocks>
  void Make(const Blocks&... blocks) {
    if constexpr (Coder<L>::kNumbers > 0) {
      for (uint64_t b = 0; b < kRowBlocks; b += L::kWidth) {
        const auto made = Coder<L>::Of(L::LoadBits(blocks.of + b)...);
        for (int i = 0; i < Coder<L>::kNumbers; ++i) L::Store(number_[i] + b, made.number[i]);
      }
    }
  }
  Coder<L> At(uint64_t block) const {
    Coder<L> coder;
    if constexpr (Coder<L>::kNumbers > 0) {
      for (int i = 0; i < Coder<L>::kNumbers; ++i) coder.number[i] = L::Set(number_[i][block]);
    }
    return coder;
  }

 private:
  alignas(64) float number_[std::max(Coder<L>::kNumbers, 1)][kRowBlocksRoom];
};

template <class L, class S>
struct RowDecoder : RowCoder<L, S::template Decoder> {
  void Load(const std::byte* const* planes, uint64_t first) {
    if constexpr (S::kScalePer > 0) {
      RowBlocks scales;
      LoadScales<S>(planes[1], first, &scales);
      this->Make(scales);
    }
  }
};

// Computes the scales from the blocks' largest magnitudes, and stores them.
template <class L, class S>
struct RowEncoder : RowCoder<L, S::template Encoder> {
  void Store(const RowBlocks& largest, std::byte* const* planes, uint64_t first) {
    if constexpr (S::kScalePer > 0) {
      RowBlocks most = largest;
      if constexpr (S::kScalePer == kRow)
        std::fill_n(most.of, kRowBlocks, *std::max_element(most.of, most.of + kRowBlocks));
      RowBlocks scales;
      for (uint64_t b = 0; b < kRowBlocks; b += L::kWidth) {
        L::StoreBits(scales.of + b, S::template Scale<L>(L::LoadBits(most.of + b)));
      }
      StoreScales<S>(planes[1], first, scales);
      this->Make(scales, most);
    }
  }
};

template <class L, class S, bool kStochastic>
inline void EncodeSlotBlock(const typename S::template Encoder<L>& encoder, const float* values,
                            const RandomWords<L> (&random)[kVectors<L>], std::byte* plane, uint64_t first) {
  BlockWords<L> words;
  for (int j = 0; j < kVectors<L>; ++j) {
    words[j] = encoder.template Encode<kStochastic>(L::Load(values + j * L::kWidth), random[j].state);
  }
  StoreBlock<L, S, 0>(plane, first, words);
}

// The largest magnitude of each block, as bits.
template <class L>
inline RowBlocks Largest(const float* row) {
  RowBlocks most;
  for (uint64_t b = 0; b < kRowBlocks; ++b) {
    auto block = L::SetBits(0);
    for (int j = 0; j < kVectors<L>; ++j) {
      const auto x = L::Load(row + b * kBlock + static_cast<uint64_t>(j) * L::kWidth);
      block = L::MaxBits(block, L::And(L::Bits(x), L::SetBits(kMagnitude)));
    }
    most.of[b] = L::Largest(block);
  }
  return most;
}

// Decodes elements [first, first + count) of a payload, count <= 256, times `scale`; the rest of the row becomes +0.
// Returns the largest magnitude, as bits.
template <class L, class Wire>
inline uint32_t DecodePayload(const std::byte* in, uint64_t first, uint64_t count, float scale, float* row) {
  alignas(64) std::byte padded[kRow * Wire::kBytes];
  const std::byte* words = in + first * Wire::kBytes;
  if (count < kRow) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, words, count * Wire::kBytes);
    words = padded;
  }
  auto most = L::SetBits(0);
  for (uint64_t i = 0; i < kRow; i += L::kWidth) {
    const auto word = L::template LoadWords<Wire::kBytes, false>(words + i * Wire::kBytes);
    const auto x = L::Mul(Wire::template Decode<L>(word), L::Set(scale));
    L::Store(row + i, x);
    most = L::MaxBits(most, L::And(L::Bits(x), L::SetBits(kMagnitude)));
  }
  std::fill(row + count, row + kRow, 0.0f);  // even where the scale is not finite
  return L::Largest(most);
}

// A function that decodes a row of gradients: DecodePayload for some format.
using GradientLoader = uint32_t (*)(const std::byte*, uint64_t, uint64_t, float, float*);

// The loader for a gradient's format.
template <class L, class Wires>
struct GradientLoaders;
template <class L, template <class...> class ListOf, class... Wires>
struct GradientLoaders<L, ListOf<Wires...>> {
  static GradientLoader Of(WireIndex format) {
    constexpr GradientLoader kLoaders[] = {&LoadAs<Wires>...};
    return kLoaders[format];
  }
  template <class Wire>
  static uint32_t LoadAs(const std::byte* in, uint64_t first, uint64_t count, float scale, float* row) {
    if constexpr (Wire::kGradient) return DecodePayload<L, Wire>(in, first, count, scale, row);
    return kInfinityBits;  // never a gradient's format; callers ask WireFormat first
  }
};

// Multiplies a row of gradients and returns the largest magnitude after it, as bits. What lies past the tensor's end
// stays +0.
template <class L>
inline uint32_t ClipRow(float clip, float* row) {
  auto largest = L::SetBits(0);
  for (uint64_t i = 0; i < kRow; i += L::kWidth) {
    const auto x = L::Mul(L::Load(row + i), L::Set(clip));
    L::Store(row + i, x);
    largest = L::MaxBits(largest, L::And(L::Bits(x), L::SetBits(kMagnitude)));
  }
  return L::Largest(largest);
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
