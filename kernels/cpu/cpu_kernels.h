// The CPU driver: one fused pass over a tensor, a row of 256 elements at a time. A row is updated in small passes
// through the first-level cache: what is stored is decoded, the rule is applied and each block's largest magnitudes are
// taken; then what comes out is encoded (cpu_row.h).
#pragma once

#include <tuple>

#include "kernels/cpu/cpu_row.h"
#include "kernels/layout.h"
#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// The row type of a rule with these formats; rules with the same moments share it.
template <class V, class Rule, class Master, class State, class Numbers>
struct RowFor;
template <class V, class Rule, class Master, class State, int... I>
struct RowFor<V, Rule, Master, State, std::integer_sequence<int, I...>> {
  using Type = CpuRow<V, Master, MomentAt<Rule, State, I>...>;
};

template <class V, class Rule, class Master, class State>
class CpuKernel {
 public:
  CpuKernel(const Update& u, GradientLoader load) : u_(u), row_(u, load) {
    constexpr void (CpuKernel::*kApply[])(uint64_t) = {&CpuKernel::ApplyRow<StatisticsLevel::kOff>,
                                                       &CpuKernel::ApplyRow<StatisticsLevel::kCore>,
                                                       &CpuKernel::ApplyRow<StatisticsLevel::kFull>};
    apply_ = kApply[static_cast<int>(u.statistics)];
    for (int i = 0; i < kMaxConstants; ++i) constants_[i] = V::Set(u.constants[i]);
  }

  TileStatistics UpdateTile(uint64_t tile) {
    row_.StartTile(tile * kTile, std::min(u_.n, (tile + 1) * kTile));
    ForEachRow(tile, [this](uint64_t first, uint64_t count) {
      row_.StartRow(first, count);
      (this->*apply_)(first);
      row_.FinishRow(first, count);
    });
    return row_.FinishTile();
  }

  // The first pass of a rule that takes two.
  float MeasureTile(uint64_t tile) {
    measured_.Clear();
    row_.template LoadDecoder<kMeasuredMoment>(tile * kTile, std::min(u_.n, (tile + 1) * kTile));
    ForEachRow(tile, [this](uint64_t first, uint64_t count) { MeasureRow(first, count); });
    return measured_.Total();
  }

 private:
  static constexpr int kMomentCount = static_cast<int>(std::size(Rule::kMoments));
  using Row = typename RowFor<V, Rule, Master, State, std::make_integer_sequence<int, kMomentCount>>::Type;
  template <int I>
  using MomentType = MomentAt<Rule, State, I>;

  template <class Do>
  void ForEachRow(uint64_t tile, Do&& act) const {
    const uint64_t end = std::min(u_.n, (tile + 1) * kTile);
    for (uint64_t first = tile * kTile; first < end; first += kRow) act(first, std::min(kRow, end - first));
  }

  using Largest = LargestOfRow<V, kMomentCount>;
  using CoreLanes = typename Row::CoreLanes;
  // A block's moments after the rule, in the form that their formats encode.
  using NewMoments = typename V::F[kMomentCount][kVectors<V>];

  // Whether a rule in two halves needs of the first half no more than what is encoded. Then the first half of each block is
  // made before the second half of the block before it, so that neither waits for the other's divisions.
  static constexpr bool kApart = [] {
    return []<int... I>(std::integer_sequence<int, I...>) {
      return Rule::kInHalves && (... && (Rule::kMoments[I] == Moment::kSigned || MomentType<I>::kStoresRoot));
    }
    (std::make_integer_sequence<int, kMomentCount>());
  }();

  // Applies the rule to the stored values and the gradients, and adds to the core statistics.
  template <StatisticsLevel kLevel>
  void ApplyRow(uint64_t first) {
    typename V::F constants[Rule::kConstants];  // of its own, since no store can change it
    for (int i = 0; i < Rule::kConstants; ++i) constants[i] = V::Set(u_.constants[i]);
    const CoreLanes core = row_.core();
    Largest most;
    if constexpr (kApart) {
      NewMoments now, next;
      FirstHalf(constants, first, 0, now);
      for (uint64_t b = 0; b < kRowBlocks - 1; ++b) {
        FirstHalf(constants, first, b + 1, next);
        SecondHalf<kLevel>(constants, first, b, now, core, &most);
        for (int m = 0; m < kMomentCount; ++m) std::copy_n(next[m], kVectors<V>, now[m]);
      }
      SecondHalf<kLevel>(constants, first, kRowBlocks - 1, now, core, &most);
    } else {
      for (uint64_t b = 0; b < kRowBlocks; ++b) BothHalves<kLevel>(constants, first, b, core, &most);
    }
    row_.FindRejected(most);
  }

  [[gnu::always_inline]] void FirstHalf(const typename V::F* constants, uint64_t first, uint64_t b,
                                        NewMoments& moments) {
    const auto old = row_.DecodeMoments(first, b);
    for (int j = 0; j < kVectors<V>; ++j) {
      Element<V> e = row_.Load(first, Index(b, j));
      row_.SetMoments(old, j, &e);
      Updated<V> r;
      Rule::template Moments<V>(constants, e, &r);
      KeepMoments(r, b, j, moments);
    }
  }
  template <StatisticsLevel kLevel>
  [[gnu::always_inline]] void SecondHalf(const typename V::F* constants, uint64_t first, uint64_t b,
                                         const NewMoments& moments, const CoreLanes& core, Largest* most) {
    for (int j = 0; j < kVectors<V>; ++j) {
      const Element<V> e = row_.Load(first, Index(b, j));
      Updated<V> r;
      Row::ForEachMoment([&](auto m) { r.moment[m] = r.root[m] = moments[m][j]; });
      Rule::template Step<V>(constants, e, &r);
      KeepWeight<kLevel>(e.grad, r, Index(b, j), core, most);
    }
    RaiseMoments(moments, b, most);
  }
  template <StatisticsLevel kLevel>
  void BothHalves(const typename V::F* constants, uint64_t first, uint64_t b, const CoreLanes& core, Largest* most) {
    const auto old = row_.DecodeMoments(first, b);
    NewMoments moments;
    for (int j = 0; j < kVectors<V>; ++j) {
      Element<V> e = row_.Load(first, Index(b, j));
      row_.SetMoments(old, j, &e);
      if constexpr (kIsOverMatrix<Rule>) e.direction = V::Load(u_.direction + first + Index(b, j));
      const auto r = ApplyRule<V, Rule>(constants, e);
      KeepMoments(r, b, j, moments);
      KeepWeight<kLevel>(e.grad, r, Index(b, j), core, most);
    }
    RaiseMoments(moments, b, most);
  }

  // Of the row's elements the first of vector j of block b.
  static uint64_t Index(uint64_t b, int j) { return b * kBlock + static_cast<uint64_t>(j) * V::kWidth; }

  void KeepMoments(const Updated<V>& r, uint64_t b, int j, NewMoments& moments) {
    Row::ForEachMoment([&](auto m) {
      moments[m][j] = MomentType<m>::kStoresRoot ? r.root[m] : r.moment[m];
      V::Store(row_.moment[m] + Index(b, j), moments[m][j]);
    });
  }
  void RaiseMoments(const NewMoments& moments, uint64_t b, Largest* most) {
    Row::ForEachMoment([&](auto m) {
      auto block = V::SetBits(0);
      for (int j = 0; j < kVectors<V>; ++j) {
        const auto magnitude = MomentType<m>::kStoresRoot ? V::Bits(moments[m][j]) : Magnitude<V>(moments[m][j]);
        block = j == 0 ? magnitude : V::MaxBits(block, magnitude);
      }
      row_.template KeepLargest<m>(b, block, &most->moment[m]);
    });
  }
  template <StatisticsLevel kLevel>
  void KeepWeight(typename V::F grad, const Updated<V>& r, uint64_t i, const CoreLanes& core, Largest* most) {
    V::Store(row_.next + i, r.weight);
    if constexpr (Master::kPaired) V::Store(row_.next_low + i, r.weight_low);
    if constexpr (kLevel == StatisticsLevel::kFull) V::Store(row_.delta + i, r.delta);
    most->weight = V::MaxBits(most->weight, Magnitude<V>(r.weight));
    if constexpr (kLevel != StatisticsLevel::kOff) Row::template AddCore<Rule::kHasRms>(core, i, grad, r);
  }

  // What each element adds; of a rule over matrices its direction, whose square that is. Zeros past the tensor's end.
  void MeasureRow(uint64_t first, uint64_t count) {
    row_.StartRow(first, count);
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      typename V::F moment[kVectors<V>];
      row_.template DecodeMoment<kMeasuredMoment>(first, b, moment);
      auto most = V::SetBits(0);
      for (int j = 0; j < kVectors<V>; ++j) {
        const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
        if constexpr (kIsOverMatrix<Rule>) {
          const auto directed = Rule::template Direct<V>(constants_, V::Load(row_.grad + i), moment[j]);
          V::Store(terms_ + i, directed.direction);
          most = V::MaxBits(most, Magnitude<V>(directed.m));
        } else {
          const auto measured = Rule::template Measure<V>(constants_, V::Load(row_.grad + i), moment[j]);
          V::Store(terms_ + i, measured.term);
          most = V::MaxBits(most, V::Bits(measured.v));
        }
      }
      DropUnlessStorable(b, most);
    }
    std::fill(terms_ + count, terms_ + kRow, 0.0f);
    for (uint64_t i = 0; i < kRow; i += V::kWidth) {
      auto term = V::Load(terms_ + i);
      if constexpr (kIsOverMatrix<Rule>) {
        V::Store(u_.direction + first + i, term);
        term = V::Mul(term, term);
      }
      measured_.template Add<V>(i, term);
    }
  }
  // Of a block that keeps its contents the first pass has zeros.
  void DropUnlessStorable(uint64_t b, typename V::U most) {
    const bool storable = V::Largest(most) <= std::bit_cast<uint32_t>(kLargestValue<MomentType<kMeasuredMoment>>);
    if (row_.rejected(b) || !storable) std::fill_n(terms_ + b * kBlock, kBlock, 0.0f);
  }
  // The moment that a first pass decodes: v, or of a matrix m.
  static constexpr int kMeasuredMoment = kIsOverMatrix<Rule> ? 0 : 1;

  const Update& u_;
  Row row_;
  void (CpuKernel::*apply_)(uint64_t);
  typename V::F constants_[kMaxConstants];
  TileSum measured_;
  alignas(64) float terms_[kRow];  // of the first pass
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
