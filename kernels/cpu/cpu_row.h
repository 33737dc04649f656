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
#include "kernels/cpu/row_sums.h"
#include "kernels/layout.h"
#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// The largest magnitudes in each position of some vectors, of weights and of each moment.
template <class V, int kMoments>
struct LargestOfRow {
  typename V::U weight = V::SetBits(0), moment[kMoments] = {};
};

// Moments: the formats of the rule's moments, in order.
template <class V, class Master, class... Moments>
class CpuRow {
 public:
  static constexpr int kMomentCount = sizeof...(Moments);
  using MomentNumbers = std::make_integer_sequence<int, kMomentCount>;
  template <int I>
  using MomentType = std::tuple_element_t<I, std::tuple<Moments...>>;

  // Number of the first plane of moment I.
  static constexpr auto kFirstPlanes = [] {
    std::array<int, kMomentCount + 1> first{PlaneCount<Master>()};
    constexpr int kCounts[] = {PlaneCount<Moments>()...};
    for (size_t i = 0; i < kMomentCount; ++i) first[i + 1] = first[i] + kCounts[i];
    return first;
  }();
  template <int I>
  static constexpr int kFirstPlane = kFirstPlanes[I];

  CpuRow(const Update& u, GradientLoader load) : u_(u), load_(load) {}

  // The row's values: gradients; the values wanted for weights and for moments, in the form that their formats encode.
  // No two arrays that a loop stores to and then loads from lie a multiple of 4096 bytes apart, here and below: such a
  // load waits for the store, as if it were from the same place.
  alignas(64) float grad[kRow], next[kRow], moment[kMomentCount][kRow];

 private:
  enum CoreSum { kGradSq, kUpdateSq, kRmsSq, kCoreSums };
  enum FullSum { kWeightSq, kStoredDot, kHiDot, kFullSums };

  alignas(64) uint32_t random_[kRow];
  // The largest magnitudes of moments, in each position of a block's vectors.
  alignas(64) uint32_t magnitudes_[kMomentCount][kRowBlocks * V::kWidth];
  RowBlocks<V> largest_[kMomentCount];  // made of them
  RowSums<kCoreSums> core_;
  TileSum full_[kFullSums];

 public:
  // The second component of weights, where there is one; and, for full statistics, the wanted updates.
  alignas(64) float next_low[kRow], delta[kRow];

  void StartTile(uint64_t first, uint64_t last) {
    out_ = {};
    if (u_.statistics != StatisticsLevel::kOff) core_.Clear();
    if (u_.statistics == StatisticsLevel::kFull) {
      for (TileSum& sum : full_) sum.Clear();
    }
    ForEachMoment([&](auto i) { LoadDecoder<i>(first, last); });
  }
  // Of moment I, for the tile's elements [first, last): all that a first pass needs of StartTile.
  template <int I>
  void LoadDecoder(uint64_t first, uint64_t last) {
    for (uint64_t e = first; e < last; e += kRow) {
      std::get<I>(decoders_).Load((e - first) / kRow, u_.planes + kFirstPlane<I>, e);
    }
  }
  void StartRow(uint64_t first, uint64_t count) {
    PrefetchPlanes(first + kAhead);
    uint32_t largest = load_(static_cast<const std::byte*>(u_.grad), first, count, u_.grad_scale, grad);
    if (u_.clip != 1) largest = ClipRow<V>(u_.clip, grad);
    rejected_ = {};
    any_rejected_ = largest >= kInfinityBits;
    if (largest >= kInfinityBits) {
      const NonFinite found = FindNonFinite(grad, count);
      out_.nonfinite += found.count;
      rejected_ = found.blocks;
      largest = found.largest;
    }
    out_.grad_absmax = std::max(out_.grad_absmax, std::bit_cast<float>(largest));
  }
  bool rejected(uint64_t block) const { return rejected_[block]; }

  // One block's moments as they are stored, decoded; the block's number counts from the row's first element.
  struct BlockMoments {
    typename V::F of[kMomentCount][kVectors<V>];
  };
  BlockMoments DecodeMoments(uint64_t first, uint64_t b) const {
    BlockMoments moments;
    ForEachMoment([&](auto m) { DecodeMoment<m>(first, b, moments.of[m]); });
    return moments;
  }
  template <int I>
  void DecodeMoment(uint64_t first, uint64_t b, typename V::F (&out)[kVectors<V>]) const {
    const auto decoder = std::get<I>(decoders_).At(first % kTile / kBlock + b);
    for (int j = 0; j < kVectors<V>; ++j) {
      const uint64_t e = first + b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
      out[j] = decoder.Decode(LoadWords<V, MomentType<I>, 0>(u_.planes[kFirstPlane<I>], e));
    }
  }
  static void SetMoments(const BlockMoments& moments, int j, Element<V>* e) {
    ForEachMoment([&](auto m) { e->moment[m] = moments.of[m][j]; });
  }
  // The weights and gradients of one vector, from number i of the row on.
  Element<V> Load(uint64_t first, uint64_t i) const {
    Element<V> e;
    e.grad = V::Load(grad + i);
    const Words<V> words = LoadMaster<V, Master>(u_.planes, first + i);
    if constexpr (Master::kPaired) {
      e.weight = Master::template Component<V>(words.word[0]);
      e.weight_low = Master::template Component<V>(words.word[1]);
    } else {
      e.weight = Master::template Decode<V>(words);
    }
    return e;
  }

  template <class Do>
  static void ForEachMoment(Do&& act) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (act(std::integral_constant<int, I>()), ...); }
    (MomentNumbers());
  }

  // Where the row in hand adds to the core statistics, whether or not its blocks can be stored.
  using CoreLanes = typename RowSums<kCoreSums>::Lanes;
  CoreLanes core() { return core_.lanes(); }
  template <bool kHasRms>
  static void AddCore(const CoreLanes& core, uint64_t i, typename V::F grad, const Updated<V>& r) {
    core.template Add<V>(kGradSq, i, V::Mul(grad, grad));
    core.template Add<V>(kUpdateSq, i, V::Mul(r.delta, r.delta));
    if constexpr (kHasRms) core.template Add<V>(kRmsSq, i, r.rms_term);
  }
  // Keeps the largest magnitudes of moment I in a block for its scale; where it has none, raises the row's.
  template <int I>
  void KeepLargest(uint64_t b, typename V::U block, typename V::U* row) {
    if constexpr (MomentType<I>::kScalePer > 0) {
      V::StoreBits(magnitudes_[I] + b * V::kWidth, block);
    } else {
      *row = V::MaxBits(*row, block);
    }
  }
  // After the rule: finds the blocks that cannot be stored. `most`: of the row's weights, and of moments without scales.
  void FindRejected(const LargestOfRow<V, kMomentCount>& most) {
    auto bad = V::GreaterBits(most.weight, V::SetBits(kLargestWeightBits<Master>));
    ForEachMoment([&](auto i) {
      if constexpr (MomentType<i>::kScalePer == 0) {
        bad = V::Either(bad, V::GreaterBits(most.moment[i], V::SetBits(kBound<i>)));
      } else {
        V::LargestOfEight(magnitudes_[i], largest_[i].of);
        for (const auto blocks : largest_[i].of) bad = V::Either(bad, V::GreaterBits(blocks, V::SetBits(kBound<i>)));
      }
    });
    if (!V::Any(bad)) return;
    any_rejected_ = true;
    RejectAbove(kLargestWeightBits<Master>, next);
    ForEachMoment([&](auto i) { RejectAbove(kBound<i>, moment[i]); });
  }

  // Stores what can be stored.
  void FinishRow(uint64_t first, uint64_t count) {
    if (count < kRow) ClearTail(count);
    const bool all = Reject();
    if (u_.dry) {
      if (!all) DropRejected(count);
      return;
    }
    if (u_.statistics == StatisticsLevel::kFull) Keep(first, PlaneCount<Master>());
    all ? Encode(first, count == kRow) : EncodeAccepted(first, count);
    if (u_.statistics == StatisticsLevel::kFull) AddFull(first, count);
  }

  TileStatistics FinishTile() {
    if (u_.statistics == StatisticsLevel::kOff) return out_;
    out_.grad_sq = core_.Total(kGradSq);
    out_.update_sq = core_.Total(kUpdateSq);
    out_.rms_sq = core_.Total(kRmsSq);
    if (u_.statistics == StatisticsLevel::kCore) return out_;
    out_.weight_sq = full_[kWeightSq].Total();
    out_.stored_dot = full_[kStoredDot].Total();
    out_.hi_dot = Master::kPaired ? full_[kHiDot].Total() : out_.stored_dot;
    if (!Master::kPaired) out_.hi_unchanged = out_.unchanged;
    return out_;
  }

 private:
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

  static constexpr bool kShared = (... || (Moments::kScalePer > kBlock));

  // Zeros what lies past the tensor's end, so that it takes no part in scales and sums.
  void ClearTail(uint64_t count) {
    ForEachValue([count](float* row) { std::fill(row + count, row + kRow, 0.0f); });
  }
  template <class Do>
  void ForEachValue(Do&& act) {
    for (float* row : {next, next_low, delta}) act(row);
    ForEachMoment([&](auto i) { act(moment[i]); });
  }

  void RejectAbove(uint32_t bound, const float* row) {
    for (uint64_t i = 0; i < kRow; ++i) {
      if ((std::bit_cast<uint32_t>(row[i]) & kMagnitude) > bound) rejected_[i / kBlock] = true;
    }
  }
  // Where plane p has an element, in bytes; of a count, how many bytes so many take.
  static constexpr uint64_t InPlane(size_t p, uint64_t element) { return element / kPlanes[p].per * kPlanes[p].bytes; }
  void PrefetchPlanes(uint64_t first) const {
    for (size_t p = 0; p < kPlanes.size(); ++p) Prefetch(u_.planes[p] + InPlane(p, first), InPlane(p, kRow));
  }

  // What is rejected adds nothing, and blocks that share a scale keep their contents together. Returns whether all can be
  // stored.
  bool Reject() {
    if (any_rejected_) {
      if constexpr (kShared) rejected_.fill(true);
      for (uint64_t b = 0; b < kRowBlocks; ++b) {
        if (rejected_[b]) core_.TakeBack(b * kBlock, kBlock);
      }
    }
    core_.FinishRow();
    return !any_rejected_;
  }

  // unchanged: no value was cleared since the rule was applied, so what was found largest still is.
  void Encode(uint64_t first, bool unchanged) {
    u_.stochastic ? EncodeAs<true>(first, unchanged) : EncodeAs<false>(first, unchanged);
  }

  // A loop for each plane: short chains of dependent operations, of which a processor has many under way.
  template <bool kStochastic>
  void EncodeAs(uint64_t first, bool unchanged) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      std::tuple<RowEncoder<V, MomentType<I>>...> encoders;
      (std::get<I>(encoders).Store(LargestOf<I>(unchanged), u_.planes + kFirstPlane<I>, first), ...);
      const RandomStream<V> stream(u_.random_key, first);
      if constexpr (kStochastic) stream.Fill(first, kRow, random_);
      for (uint64_t b = 0; b < kRowBlocks; ++b) EncodeWeights<kStochastic>(stream, first, b * kBlock);
      (EncodeMoment<kStochastic, I>(first, std::get<I>(encoders)), ...);
    }
    (MomentNumbers());
  }
  template <int I>
  RowBlocks<V> LargestOf(bool unchanged) const {
    if constexpr (MomentType<I>::kScalePer == 0) return {};
    return unchanged ? largest_[I] : Largest<V>(moment[I]);
  }
  template <bool kStochastic, int I, class Encoders>
  void EncodeMoment(uint64_t first, const Encoders& encoders) {
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      EncodeMomentBlock<V, MomentType<I>, kStochastic>(encoders.At(b), moment[I] + b * kBlock, random_ + b * kBlock,
                                                       u_.planes[kFirstPlane<I>], first + b * kBlock);
    }
  }
  template <bool kStochastic>
  void EncodeWeights(const RandomStream<V>& stream, uint64_t first, uint64_t i) {
    BlockWords<V> words[2];
    for (int j = 0; j < kVectors<V>; ++j) {
      const uint64_t at = i + static_cast<uint64_t>(j) * V::kWidth;
      Words<V> w;
      if constexpr (Master::kPaired) {
        w = Master::template EncodePair<V>(V::Load(next + at), V::Load(next_low + at));
      } else {
        const auto random = kStochastic ? stream.ForMaster(V::LoadBits(random_ + at)) : V::SetBits(0);
        w = Master::template Encode<V, kStochastic>(V::Load(next + at), random);
      }
      words[0][j] = w.word[0];
      if constexpr (PlaneCount<Master>() == 2) words[1][j] = w.word[1];
    }
    StoreBlock<V, Master, 0>(u_.planes[0], first + i, words[0]);
    if constexpr (PlaneCount<Master>() == 2) StoreBlock<V, Master, 1>(u_.planes[1], first + i, words[1]);
  }

  // The rare path: encodes everything with zeros in place of what cannot be stored, then puts the old contents back.
  void EncodeAccepted(uint64_t first, uint64_t count) {
    Keep(first, kPlanes.size());
    DropRejected(count);
    Encode(first, false);
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
    }
  }
  void Keep(uint64_t first, size_t planes) {
    for (size_t p = 0; p < planes; ++p) std::memcpy(old_[p], u_.planes[p] + InPlane(p, first), InPlane(p, kRow));
  }
  void PutBack(size_t p, uint64_t first, uint64_t block) {
    const StoredPlane& plane = kPlanes[p];
    const uint64_t at = InPlane(p, block * kBlock);
    const uint64_t bytes = std::max<uint64_t>(kBlock / plane.per, 1) * plane.bytes;
    std::memcpy(u_.planes[p] + InPlane(p, first) + at, old_[p] + at, bytes);
  }

  void AddFull(uint64_t first, uint64_t count) {
    auto same = V::SetBits(0), hi_same = V::SetBits(0), saturated = V::SetBits(0);
    uint32_t tail = 0;  // past the tensor's end there are zeros, unchanged
    for (uint64_t b = 0; b * kBlock < count; ++b) {
      if (rejected_[b]) continue;
      for (int j = 0; j < kVectors<V>; ++j) {
        const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
        AddStored(first, i, &same, &hi_same);
        ForEachMoment([&](auto s) {
          using S = MomentType<s>;
          const auto code = LoadWords<V, S, 0>(u_.planes[kFirstPlane<s>], first + i);
          saturated = V::IncrementIf(S::template Saturated<V>(code), saturated);
        });
      }
      tail += static_cast<uint32_t>(kBlock - std::min(kBlock, count - b * kBlock));
    }
    out_.unchanged += Total(same) - tail;
    if constexpr (Master::kPaired) out_.hi_unchanged += Total(hi_same) - tail;
    out_.saturated += Total(saturated);
  }
  void AddStored(uint64_t first, uint64_t i, typename V::U* same, typename V::U* hi_same) {
    const std::byte* kept[2] = {old_[0], old_[1]};
    const Words<V> before = LoadMaster<V, Master>(kept, i), after = LoadMaster<V, Master>(u_.planes, first + i);
    const auto x = Master::template Decode<V>(before), d = V::Load(delta + i);
    full_[kWeightSq].template Add<V>(i, V::Mul(x, x));
    const auto one = V::EqualBits(before.word[0], after.word[0]);
    if constexpr (Master::kPaired) {
      const auto hi = Change(before.word[0], after.word[0]), lo = Change(before.word[1], after.word[1]);
      full_[kStoredDot].template Add<V>(i, V::Mul(d, V::Add(hi, lo)));
      full_[kHiDot].template Add<V>(i, V::Mul(d, hi));
      *hi_same = V::IncrementIf(one, *hi_same);
    } else {
      full_[kStoredDot].template Add<V>(i, V::Mul(d, V::Sub(Master::template Decode<V>(after), x)));
    }
    auto counted = V::IncrementIf(one, V::SetBits(0));
    if constexpr (kIsComparedByValue<Master>) {
      const auto change = V::Bits(V::Sub(Master::template Decode<V>(after), x));
      counted = V::IncrementIf(V::EqualBits(V::And(change, V::SetBits(kMagnitude)), V::SetBits(0)), V::SetBits(0));
    } else if constexpr (PlaneCount<Master>() == 2) {
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
  bool any_rejected_ = false;
  std::tuple<RowDecoder<V, Moments, kTile / kRow>...> decoders_;  // of the tile
  TileStatistics out_ = {};
  alignas(64) std::byte old_[kMaxPlanes][kRow * 4];  // contents before the update
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
