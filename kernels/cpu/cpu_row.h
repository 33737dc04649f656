// One row of a tensor in an update: everything that does not depend on the rule. It widens gradients and decodes stored
// values; the rule computes the values wanted; then it decides which blocks can be stored, encodes them (the numbers
// that depend on a block are made for the eight blocks of the row side by side), and adds up the statistics.
//
// A block in which a gradient is not finite, or in which |m|, sqrt(v) or |x| comes out above its format's bound, keeps
// its old contents and is counted; its only figure that counts is the largest finite gradient. Blocks that share a
// scale keep their contents together.
#pragma once

#include <array>
#include <tuple>

#include "kernels/cpu/cpu_rows.h"
#include "kernels/layout.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// Moments: the formats of the rule's moments, in order.
template <class V, class Master, class... Moments>
class CpuRow {
 public:
  static constexpr int kMomentCount = sizeof...(Moments);
  using MomentNumbers = std::make_integer_sequence<int, kMomentCount>;
  template <int I>
  using MomentType = std::tuple_element_t<I, std::tuple<Moments...>>;

  CpuRow(const Update& u, GradientLoader load) : u_(u), load_(load) {}

  // The row's values: gradients; the values wanted for weights (and their second component) and for moments, in the
  // form that their formats encode; the terms of the core statistics; and each block's largest magnitude of weights and
  // moments.
  alignas(64) float grad[kRow], next[kRow], next_low[kRow], delta[kRow], rms[kRow] = {}, moment[kMomentCount][kRow];
  RowBlocks most[1 + kMomentCount];

  void StartTile() {
    out_ = {};
    for (TileSum& sum : sums_) sum.Clear();
  }
  void StartRow(uint64_t first, uint64_t count) {
    uint32_t largest = load_(static_cast<const std::byte*>(u_.grad), first, count, u_.grad_scale, grad);
    if (u_.clip != 1) largest = ClipRow<V>(u_.clip, grad);
    rejected_ = {};
    if (largest >= kInfinityBits) {
      const NonFinite found = FindNonFinite(grad, count);
      out_.nonfinite += found.count;
      rejected_ = found.blocks;
      largest = found.largest;
    }
    out_.grad_absmax = std::max(out_.grad_absmax, std::bit_cast<float>(largest));
  }
  bool rejected(uint64_t block) const { return rejected_[block]; }

  // The decoders of every moment for this row, and what is stored of one block or vector.
  auto Decoders(uint64_t first) const {
    return [&]<int... I>(std::integer_sequence<int, I...>) { return std::tuple{Decoder<I>(first)...}; }
    (MomentNumbers());
  }
  template <int I>
  RowDecoder<V, MomentType<I>> Decoder(uint64_t first) const {
    RowDecoder<V, MomentType<I>> decoder;
    decoder.Load(u_.planes + kFirstPlane<I>, first);
    return decoder;
  }
  template <int I>
  void DecodeMoment(const typename MomentType<I>::template Decoder<V>& decoder, uint64_t first,
                    typename V::F (&out)[kVectors<V>]) const {
    for (int j = 0; j < kVectors<V>; ++j) {
      const uint64_t at = first + static_cast<uint64_t>(j) * V::kWidth;
      out[j] = decoder.Decode(LoadWords<V, MomentType<I>, 0>(u_.planes[kFirstPlane<I>], at));
    }
  }
  Element<V> LoadWeight(uint64_t first) const {
    Element<V> e{};
    const Words<V> words = LoadMaster<V, Master>(u_.planes, first);
    if constexpr (Master::kPaired) {
      e.weight = Master::template Component<V>(words.word[0]);
      e.weight_low = Master::template Component<V>(words.word[1]);
    } else {
      e.weight = Master::template Decode<V>(words);
    }
    return e;
  }

  // Stores what can be stored.
  void FinishRow(uint64_t first, uint64_t count) {
    if (count < kRow) ClearTail(count);
    const bool all = Reject();
    if (u_.dry) return FinishDry(all, count);
    if (u_.statistics == StatisticsLevel::kFull) Keep(first, PlaneCount<Master>());
    all ? Encode(first) : EncodeAccepted(first, count);
    if (u_.statistics != StatisticsLevel::kOff) AddCore();
    if (u_.statistics == StatisticsLevel::kFull) AddFull(first, count);
  }

  TileStatistics FinishTile() {
    if (u_.statistics == StatisticsLevel::kOff) return out_;
    out_.grad_sq = sums_[kGradSq].Total();
    out_.update_sq = sums_[kUpdateSq].Total();
    out_.rms_sq = sums_[kRmsSq].Total();
    if (u_.statistics == StatisticsLevel::kCore) return out_;
    out_.weight_sq = sums_[kWeightSq].Total();
    out_.stored_dot = sums_[kStoredDot].Total();
    out_.hi_dot = Master::kPaired ? sums_[kHiDot].Total() : out_.stored_dot;
    if (!Master::kPaired) out_.hi_unchanged = out_.unchanged;
    return out_;
  }

 private:
  enum Sum { kGradSq, kUpdateSq, kRmsSq, kWeightSq, kStoredDot, kHiDot, kSums };

  static constexpr auto kFirstPlanes = [] {
    std::array<int, kMomentCount + 1> first{PlaneCount<Master>()};
    constexpr int kCounts[] = {PlaneCount<Moments>()...};
    for (size_t i = 0; i < kMomentCount; ++i) first[i + 1] = first[i] + kCounts[i];
    return first;
  }();
  template <int I>
  static constexpr int kFirstPlane = kFirstPlanes[I];
  static constexpr int kPlaneCount = kFirstPlanes[kMomentCount];
  static_assert(kPlaneCount <= kMaxPlanes);
  // Every plane as declared, and the bound of moment I's magnitudes.
  static constexpr auto kPlanes = [] {
    std::array<StoredPlane, kPlaneCount> planes{};
    auto to = std::copy(std::begin(Master::kPlanes), std::end(Master::kPlanes), planes.begin());
    ((to = std::copy(std::begin(Moments::kPlanes), std::end(Moments::kPlanes), to)), ...);
    return planes;
  }();
  template <int I>
  static constexpr uint32_t kBound = MomentType<I>::kLargestBits;

  template <class Do>
  static void ForEachMoment(Do&& act) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (act(std::integral_constant<int, I>()), ...); }
    (MomentNumbers());
  }

  // Zeros what lies past the tensor's end, so that it takes no part in scales and sums.
  void ClearTail(uint64_t count) {
    ForEachValue([count](float* row) { std::fill(row + count, row + kRow, 0.0f); });
    most[0] = Largest<V>(next);
    ForEachMoment([this](auto i) { most[1 + i] = Largest<V>(moment[i]); });
  }
  template <class Do>
  void ForEachValue(Do&& act) {
    for (float* row : {next, next_low, delta, rms}) act(row);
    ForEachMoment([&](auto i) { act(moment[i]); });
  }

  // Adds the blocks that cannot be stored to those already rejected. Returns whether there are none.
  bool Reject() {
    bool any = false;
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      bool bad = most[0].of[b] > kLargestBits;
      ForEachMoment([&](auto i) { bad = bad || most[1 + i].of[b] > kBound<i>; });
      rejected_[b] = rejected_[b] || bad;
      any = any || rejected_[b];
    }
    bool shared = false;
    ForEachMoment([&](auto i) { shared = shared || MomentType<i>::kScalePer > kBlock; });
    if (any && shared) rejected_.fill(true);
    return !any;
  }

  void FinishDry(bool all, uint64_t count) {
    if (!all) DropRejected(count);
    if (u_.statistics != StatisticsLevel::kOff) AddCore();
  }

  void Encode(uint64_t first) { u_.stochastic ? EncodeAs<true>(first) : EncodeAs<false>(first); }

  template <bool kStochastic>
  void EncodeAs(uint64_t first) {
    const RandomStream<V> stream(u_.random_key, first);
    const auto encoders = StoreEncoders(first, MomentNumbers());
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      const uint64_t i = b * kBlock;
      RandomWords<V> random[kVectors<V>];
      for (int j = 0; j < kVectors<V>; ++j) random[j] = stream.At(first + i + static_cast<uint64_t>(j) * V::kWidth);
      EncodeWeights<kStochastic>(first, i, random);
      [&]<int... I>(std::integer_sequence<int, I...>) {
        (EncodeMomentBlock<V, MomentType<I>, kStochastic>(std::get<I>(encoders).At(b), moment[I] + i, random,
                                                          u_.planes[kFirstPlane<I>], first + i),
         ...);
      }
      (MomentNumbers());
    }
  }
  template <int... I>
  auto StoreEncoders(uint64_t first, std::integer_sequence<int, I...>) const {
    std::tuple<RowEncoder<V, MomentType<I>>...> encoders;
    (std::get<I>(encoders).Store(most[1 + I], u_.planes + kFirstPlane<I>, first), ...);
    return encoders;
  }
  template <bool kStochastic>
  void EncodeWeights(uint64_t first, uint64_t i, const RandomWords<V> (&random)[kVectors<V>]) {
    BlockWords<V> words[2];
    for (int j = 0; j < kVectors<V>; ++j) {
      const uint64_t at = i + static_cast<uint64_t>(j) * V::kWidth;
      Words<V> w;
      if constexpr (Master::kPaired) {
        w = Master::template EncodePair<V>(V::Load(next + at), V::Load(next_low + at));
      } else {
        w = Master::template Encode<V, kStochastic>(V::Load(next + at), random[j].master);
      }
      words[0][j] = w.word[0];
      if constexpr (PlaneCount<Master>() == 2) words[1][j] = w.word[1];
    }
    StoreBlock<V, Master, 0>(u_.planes[0], first + i, words[0]);
    if constexpr (PlaneCount<Master>() == 2) StoreBlock<V, Master, 1>(u_.planes[1], first + i, words[1]);
  }

  // The rare path: encodes everything with zeros in place of what cannot be stored, then puts the old contents back.
  void EncodeAccepted(uint64_t first, uint64_t count) {
    Keep(first, static_cast<int>(kPlanes.size()));
    DropRejected(count);
    Encode(first);
    for (size_t p = 0; p < kPlanes.size(); ++p) {
      for (uint64_t b = 0; b < kRowBlocks; ++b) {
        if (rejected_[b]) PutBack(p, first, b);
      }
    }
  }
  // Zeros in place of what cannot be stored, and counts it.
  void DropRejected(uint64_t count) {
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      if (!rejected_[b]) continue;
      if (b * kBlock < count) ++out_.rejected;
      ForEachValue([b](float* row) { std::fill_n(row + b * kBlock, kBlock, 0.0f); });
      std::fill_n(grad + b * kBlock, kBlock, 0.0f);
      for (RowBlocks& blocks : most) blocks.of[b] = 0;
    }
  }
  void Keep(uint64_t first, int planes) {
    for (int p = 0; p < planes; ++p) {
      const StoredPlane& plane = kPlanes[static_cast<size_t>(p)];
      std::memcpy(old_[p], u_.planes[p] + first / plane.per * plane.bytes, kRow / plane.per * plane.bytes);
    }
  }
  void PutBack(size_t p, uint64_t first, uint64_t block) {
    const StoredPlane& plane = kPlanes[p];
    const uint64_t at = block * kBlock / plane.per * plane.bytes;
    const uint64_t bytes = std::max<uint64_t>(kBlock / plane.per, 1) * plane.bytes;
    std::memcpy(u_.planes[p] + first / plane.per * plane.bytes + at, old_[p] + at, bytes);
  }

  void AddCore() {
    for (uint64_t i = 0; i < kRow; i += V::kWidth) {
      const auto g = V::Load(grad + i), d = V::Load(delta + i);
      sums_[kGradSq].template Add<V>(i, V::Mul(g, g));
      sums_[kUpdateSq].template Add<V>(i, V::Mul(d, d));
      sums_[kRmsSq].template Add<V>(i, V::Load(rms + i));
    }
  }

  void AddFull(uint64_t first, uint64_t count) {
    for (uint64_t b = 0; b * kBlock < count; ++b) {
      if (rejected_[b]) continue;
      auto same = V::SetBits(0), hi_same = V::SetBits(0), saturated = V::SetBits(0);
      for (int j = 0; j < kVectors<V>; ++j) {
        const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
        AddStored(first, i, &same, &hi_same);
        ForEachMoment([&](auto s) {
          using S = MomentType<s>;
          const auto code = LoadWords<V, S, 0>(u_.planes[kFirstPlane<s>], first + i);
          saturated = V::IncrementIf(S::template Saturated<V>(code), saturated);
        });
      }
      const uint32_t tail = static_cast<uint32_t>(kBlock - std::min(kBlock, count - b * kBlock));  // zeros, unchanged
      out_.unchanged += Total(same) - tail;
      if constexpr (Master::kPaired) out_.hi_unchanged += Total(hi_same) - tail;
      out_.saturated += Total(saturated);
    }
  }
  void AddStored(uint64_t first, uint64_t i, typename V::U* same, typename V::U* hi_same) {
    const std::byte* kept[2] = {old_[0], old_[1]};
    const Words<V> before = LoadMaster<V, Master>(kept, i), after = LoadMaster<V, Master>(u_.planes, first + i);
    const auto x = Master::template Decode<V>(before), d = V::Load(delta + i);
    sums_[kWeightSq].template Add<V>(i, V::Mul(x, x));
    const auto one = V::EqualBits(before.word[0], after.word[0]);
    if constexpr (Master::kPaired) {
      const auto hi = Change(before.word[0], after.word[0]), lo = Change(before.word[1], after.word[1]);
      sums_[kStoredDot].template Add<V>(i, V::Mul(d, V::Add(hi, lo)));
      sums_[kHiDot].template Add<V>(i, V::Mul(d, hi));
      *hi_same = V::IncrementIf(one, *hi_same);
    } else {
      sums_[kStoredDot].template Add<V>(i, V::Mul(d, V::Sub(Master::template Decode<V>(after), x)));
    }
    auto counted = V::IncrementIf(one, V::SetBits(0));
    if constexpr (PlaneCount<Master>() == 2) {
      const auto two = V::EqualBits(before.word[1], after.word[1]);
      counted = V::And(counted, V::IncrementIf(two, V::SetBits(0)));
    }
    *same = V::AddBits(*same, counted);
  }
  static typename V::F Change(typename V::U before, typename V::U after) {
    return V::Sub(Master::template Component<V>(after), Master::template Component<V>(before));
  }
  static uint32_t Total(typename V::U counts) {
    uint32_t each[V::kWidth], total = 0;
    V::StoreBits(each, counts);
    for (const uint32_t count : each) total += count;
    return total;
  }

  const Update& u_;
  const GradientLoader load_;
  std::array<bool, kRowBlocks> rejected_ = {};
  TileStatistics out_ = {};
  alignas(64) std::byte old_[kMaxPlanes][kRow * 4];  // contents before the update
  TileSum sums_[kSums];
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
