// The CPU driver: one fused pass over a tensor, a block of 32 at a time. It loads and widens, has the rule and the
// formats compute over a lane type, takes the block's maximum, decides whether the block is accepted, stores, and adds
// up the statistics. A block in which a gradient is not finite, or in which |m|, sqrt(v) or |x| comes out above 2^119,
// keeps its old contents and is counted; of its figures only the largest finite gradient is kept.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/formats/format.h"
#include "kernels/formats/wire.h"
#include "kernels/layout.h"
#include "kernels/random.h"
#include "kernels/registry.h"
#include "kernels/rules/rule.h"
#include "kernels/statistics.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr uint32_t kLargestBits = 0x7b000000u;  // 2^119
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// Words of `bytes` bytes, zero-extended, of one block.
inline void LoadWords(const std::byte* plane, uint32_t bytes, uint64_t first, uint32_t* out) {
  const std::byte* p = plane + first * bytes;
  if (bytes == 4) {
    std::memcpy(out, p, kBlock * 4);
  } else if (bytes == 2) {
    uint16_t words[kBlock];
    std::memcpy(words, p, sizeof words);
    for (uint64_t i = 0; i < kBlock; ++i) out[i] = words[i];
  } else {
    for (uint64_t i = 0; i < kBlock; ++i) out[i] = static_cast<uint32_t>(p[i]);
  }
}

inline void StoreWords(std::byte* plane, uint32_t bytes, uint64_t first, const uint32_t* in) {
  std::byte* p = plane + first * bytes;
  if (bytes == 4) {
    std::memcpy(p, in, kBlock * 4);
  } else if (bytes == 2) {
    uint16_t words[kBlock];
    for (uint64_t i = 0; i < kBlock; ++i) words[i] = static_cast<uint16_t>(in[i]);
    std::memcpy(p, words, sizeof words);
  } else {
    for (uint64_t i = 0; i < kBlock; ++i) p[i] = static_cast<std::byte>(in[i]);
  }
}

template <class L, class Rule, class Master, class State>
class CpuKernel {
 public:
  using Planes = Layout<Rule, Master, State>;
  static constexpr int kSlotCount = Planes::kSlotCount;
  template <int I>
  using SlotType = typename Planes::template SlotType<I>;
  static_assert(kPlanesOf<Rule, Master, State>.size() <= kMaxPlanes);

  static void Update(const kernels::Update& u, uint64_t first, uint64_t last, TileStatistics* stats) {
    for (uint64_t tile = first; tile < last; ++tile) stats[tile - first] = CpuKernel(u).UpdateTile(tile);
  }

 private:
  explicit CpuKernel(const kernels::Update& u) : u_(u) {}

  template <int I>
  static constexpr int kFirstPlane = Planes::template FirstPlane<I>();

  // One block's values on their way through.
  struct Block {
    alignas(64) float grad[kBlock], weight[kBlock], next[kBlock], delta[kBlock], rms[kBlock];
    alignas(64) float slot[kMaxSlots][kBlock], root[kMaxSlots][kBlock];
    alignas(64) uint32_t word[kMaxPlanes][kBlock], stored[2][kBlock];
    alignas(64) uint32_t state_bits[kBlock], master_bits[kBlock];
  };

  TileStatistics UpdateTile(uint64_t tile) {
    const uint64_t end = std::min(u_.n, (tile + 1) * kTile);
    for (uint64_t first = tile * kTile; first < end; first += kBlock) {
      UpdateBlock(first, std::min(kBlock, end - first), (first - tile * kTile) / kBlock);
    }
    out_.grad_sq = sums_.Total(TileSums::kGradSq);
    out_.update_sq = sums_.Total(TileSums::kUpdateSq);
    out_.rms_sq = sums_.Total(TileSums::kRmsSq);
    if (u_.full_statistics) {
      out_.weight_sq = sums_.Total(TileSums::kWeightSq);
      out_.stored_dot = sums_.Total(TileSums::kStoredDot);
    }
    return out_;
  }

  void UpdateBlock(uint64_t first, uint64_t count, uint64_t block) {
    Block b;
    const uint32_t nonfinite = LoadGradient(first, count, b.grad);
    Decode(first, &b);
    Apply(&b);
    ClearTail(count, &b);
    out_.nonfinite += nonfinite;
    const uint32_t absmax = nonfinite == 0 ? AbsMax(b.grad) : FiniteAbsMax(b.grad);
    out_.grad_absmax = std::max(out_.grad_absmax, std::bit_cast<float>(absmax));
    if (nonfinite > 0 || !Acceptable(b)) {
      ++out_.rejected;
      return;
    }
    Encode(first, &b);
    AddCore(block, b);
    if (u_.full_statistics) AddFull(block, count, b);
    StoreBlock(first, b);
  }

  // Returns how many of the block's gradients are not finite.
  uint32_t LoadGradient(uint64_t first, uint64_t count, float* grad) const {
    using Loader = void (*)(const void*, uint64_t, uint64_t, float*);
    constexpr Loader kLoaders[] = {&DecodeWire<WireFp32>, &DecodeWire<WireBf16>, &DecodeWire<WireFp16>};
    kLoaders[u_.grad_format](u_.grad, first, count, grad);
    for (uint64_t i = 0; i < kBlock; ++i) grad[i] *= u_.grad_scale;
    std::fill(grad + count, grad + kBlock, 0.0f);  // even where the scale is not finite
    uint32_t nonfinite = 0;
    for (uint64_t i = 0; i < kBlock; ++i) {
      nonfinite += (std::bit_cast<uint32_t>(grad[i]) & 0x7fffffffu) >= kInfinityBits ? 1 : 0;
    }
    return nonfinite;
  }

  template <class Wire>
  static void DecodeWire(const void* in, uint64_t first, uint64_t count, float* out) {
    typename Wire::Word words[kBlock] = {};
    std::memcpy(words, static_cast<const std::byte*>(in) + first * sizeof words[0], count * sizeof words[0]);
    for (uint64_t i = 0; i < kBlock; ++i) out[i] = Wire::Decode(words[i]);
  }

  void Decode(uint64_t first, Block* b) const {
    for (int p = 0; p < PlaneCount<Master>(); ++p) {
      LoadWords(u_.planes[p], Master::kPlanes[p].bytes, first, b->word[p]);
    }
    for (uint64_t i = 0; i < kBlock; i += L::kWidth)
      L::Store(b->weight + i, Master::template Decode<L>(MasterWords(b->word, i)));
    [&]<int... I>(std::integer_sequence<int, I...>) { (DecodeSlot<I>(first, b), ...); }
    (std::make_integer_sequence<int, kSlotCount>());
  }

  static Words<L> MasterWords(const uint32_t (*word)[kBlock], uint64_t i) {
    Words<L> w{};
    for (int p = 0; p < PlaneCount<Master>(); ++p) w.word[p] = L::LoadBits(word[p] + i);
    return w;
  }

  template <int I>
  void DecodeSlot(uint64_t first, Block* b) const {
    using S = SlotType<I>;
    uint32_t* codes = b->word[kFirstPlane<I>];
    LoadWords(u_.planes[kFirstPlane<I>], S::kPlanes[0].bytes, first, codes);
    const typename S::template Block<L> format(LoadScale<I>(first));
    for (uint64_t i = 0; i < kBlock; i += L::kWidth) L::Store(b->slot[I] + i, format.Decode(L::LoadBits(codes + i)));
  }

  template <int I>
  uint32_t LoadScale(uint64_t first) const {
    uint16_t scale = 0;
    if constexpr (PlaneCount<SlotType<I>>() == 2) {
      std::memcpy(&scale, u_.planes[kFirstPlane<I> + 1] + first / kBlock * sizeof scale, sizeof scale);
    }
    return scale;
  }

  void Apply(Block* b) const {
    for (uint64_t i = 0; i < kBlock; i += L::kWidth) {
      Element<L> e{};
      e.grad = L::Load(b->grad + i);
      e.weight = L::Load(b->weight + i);
      for (int s = 0; s < kSlotCount; ++s) e.slot[s] = L::Load(b->slot[s] + i);
      const Updated<L> r = Rule::template Apply<L>(u_.constants, e);
      L::Store(b->next + i, r.weight);
      L::Store(b->delta + i, r.delta);
      L::Store(b->rms + i, r.rms_term);
      for (int s = 0; s < kSlotCount; ++s) L::Store(b->slot[s] + i, r.slot[s]);
      for (int s = 0; s < kSlotCount; ++s) L::Store(b->root[s] + i, r.root[s]);
    }
  }

  // What lies past the tensor's end stays zero and takes no part in scales and sums.
  static void ClearTail(uint64_t count, Block* b) {
    for (uint64_t i = count; i < kBlock; ++i) {
      b->weight[i] = b->next[i] = b->delta[i] = b->rms[i] = 0;
      for (int s = 0; s < kSlotCount; ++s) b->slot[s][i] = b->root[s][i] = 0;
    }
  }

  static uint32_t AbsMax(const float* x) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < kBlock; ++i) most = std::max(most, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
    return most;
  }

  static uint32_t FiniteAbsMax(const float* x) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < kBlock; ++i) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
      most = std::max(most, magnitude < kInfinityBits ? magnitude : 0);
    }
    return most;
  }

  static bool Acceptable(const Block& b) {
    uint32_t most = AbsMax(b.next);
    for (int s = 0; s < kSlotCount; ++s) most = std::max(most, AbsMax(b.root[s]));
    return most <= kLargestBits;
  }

  void Encode(uint64_t first, Block* b) const {
    for (uint64_t i = 0; i < kBlock; i += L::kWidth) {
      const RandomWords<L> r = Random<L>(u_.random_key, first + i);
      L::StoreBits(b->state_bits + i, r.state);
      const Words<L> w = Master::template Encode<L>(L::Load(b->next + i), r.master, u_.stochastic);
      for (int p = 0; p < PlaneCount<Master>(); ++p) L::StoreBits(b->stored[p] + i, w.word[p]);
    }
    [&]<int... I>(std::integer_sequence<int, I...>) { (EncodeSlot<I>(first, b), ...); }
    (std::make_integer_sequence<int, kSlotCount>());
  }

  template <int I>
  void EncodeSlot(uint64_t first, Block* b) const {
    using S = SlotType<I>;
    const float* values = S::kStoresRoot ? b->root[I] : b->slot[I];
    const uint32_t scale = S::Scale(AbsMax(values));
    if constexpr (PlaneCount<S>() == 2) {
      const auto stored = static_cast<uint16_t>(scale);
      std::memcpy(u_.planes[kFirstPlane<I> + 1] + first / kBlock * sizeof stored, &stored, sizeof stored);
    }
    const typename S::template Block<L> format(scale);
    uint32_t* codes = b->word[kFirstPlane<I>];
    for (uint64_t i = 0; i < kBlock; i += L::kWidth) {
      L::StoreBits(codes + i, format.Encode(L::Load(values + i), L::LoadBits(b->state_bits + i), u_.stochastic));
    }
  }

  void AddCore(uint64_t block, const Block& b) {
    float terms[kBlock];
    for (uint64_t i = 0; i < kBlock; ++i) terms[i] = b.grad[i] * b.grad[i];
    sums_.Add(TileSums::kGradSq, block, terms);
    for (uint64_t i = 0; i < kBlock; ++i) terms[i] = b.delta[i] * b.delta[i];
    sums_.Add(TileSums::kUpdateSq, block, terms);
    sums_.Add(TileSums::kRmsSq, block, b.rms);
  }

  void AddFull(uint64_t block, uint64_t count, const Block& b) {
    float terms[kBlock];
    for (uint64_t i = 0; i < kBlock; ++i) terms[i] = b.weight[i] * b.weight[i];
    sums_.Add(TileSums::kWeightSq, block, terms);
    for (uint64_t i = 0; i < kBlock; i += L::kWidth) {
      const auto after = Master::template Decode<L>(MasterWords(b.stored, i));
      L::Store(terms + i, L::Mul(L::Load(b.delta + i), L::Sub(after, L::Load(b.weight + i))));
    }
    sums_.Add(TileSums::kStoredDot, block, terms);
    for (uint64_t i = 0; i < count; ++i) {
      bool same = true;
      for (int p = 0; p < PlaneCount<Master>(); ++p) same = same && b.stored[p][i] == b.word[p][i];
      out_.unchanged += same ? 1 : 0;
      [&]<int... I>(std::integer_sequence<int, I...>) {
        ((out_.saturated += SlotType<I>::Saturated(b.word[kFirstPlane<I>][i]) ? 1 : 0), ...);
      }
      (std::make_integer_sequence<int, kSlotCount>());
    }
  }

  void StoreBlock(uint64_t first, const Block& b) const {
    for (int p = 0; p < PlaneCount<Master>(); ++p)
      StoreWords(u_.planes[p], Master::kPlanes[p].bytes, first, b.stored[p]);
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (StoreWords(u_.planes[kFirstPlane<I>], SlotType<I>::kPlanes[0].bytes, first, b.word[kFirstPlane<I>]), ...);
    }
    (std::make_integer_sequence<int, kSlotCount>());
  }

  const kernels::Update& u_;
  TileSums sums_;
  TileStatistics out_{};
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
