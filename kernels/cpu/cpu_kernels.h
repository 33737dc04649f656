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

  // Whether a rule in two halves gets a loop for each: where what is encoded is all that the second half needs, and a
  // processor has too few registers for both at once. With 32 one loop is 6 % faster (AMD family 25 model 17).
  static constexpr bool kTwoLoops = [] {
    return []<int... I>(std::integer_sequence<int, I...>) {
      return V::kFewRegisters && Rule::kInHalves &&
             (... && (Rule::kMoments[I] == Moment::kSigned || MomentType<I>::kStoresRoot));
    }
    (std::make_integer_sequence<int, kMomentCount>());
  }();

  // Applies the rule to the stored values and the gradients, and adds to the core statistics.
  template <StatisticsLevel kLevel>
  void ApplyRow(uint64_t first) {
    typename V::F constants[Rule::kConstants];  // of its own, since no store can change it
    for (int i = 0; i < Rule::kConstants; ++i) constants[i] = constants_[i];
    if constexpr (kTwoLoops) {
      for (uint64_t b = 0; b < kRowBlocks; ++b) UpdateMoments(constants, first, b);
    }
    for (uint64_t b = 0; b < kRowBlocks; ++b) UpdateBlock<kLevel>(constants, first, b);
  }

  void UpdateMoments(const typename V::F* constants, uint64_t first, uint64_t b) {
    const auto old = row_.DecodeMoments(first, b);
    for (int j = 0; j < kVectors<V>; ++j) {
      const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
      Element<V> e = row_.Load(first, i);
      row_.SetMoments(old, j, &e);
      Updated<V> r;
      Rule::template Moments<V>(constants, e, &r);
      Row::ForEachMoment([&](auto m) { V::Store(row_.moment[m] + i, Encoded<m>(r)); });
    }
  }
  template <StatisticsLevel kLevel>
  void UpdateBlock(const typename V::F* constants, uint64_t first, uint64_t b) {
    typename Row::BlockMoments old;
    if constexpr (!kTwoLoops) old = row_.DecodeMoments(first, b);
    CoreTerms<V> terms;
    BlockLargest<V, kMomentCount> most;
    for (int j = 0; j < kVectors<V>; ++j) {
      const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
      Element<V> e = row_.Load(first, i);
      Updated<V> r;
      if constexpr (kTwoLoops) {
        Row::ForEachMoment([&](auto m) { r.moment[m] = r.root[m] = V::Load(row_.moment[m] + i); });
        Rule::template Step<V>(constants, e, &r);
      } else {
        row_.SetMoments(old, j, &e);
        if constexpr (kIsOverMatrix<Rule>) e.direction = V::Load(u_.direction + first + i);
        r = ApplyRule<V, Rule>(constants, e);
        Row::ForEachMoment([&](auto m) { V::Store(row_.moment[m] + i, Encoded<m>(r)); });
      }
      Row::ForEachMoment([&](auto m) { RaiseTo(Encoded<m>(r), &most.moment[m]); });
      KeepWeight<kLevel>(r, i);
      RaiseTo(r.weight, &most.weight);
      terms.grad[j] = e.grad;
      terms.delta[j] = r.delta;
      if constexpr (Rule::kHasRms) terms.rms[j] = r.rms_term;
    }
    row_.template FinishBlock<kLevel != StatisticsLevel::kOff, Rule::kHasRms>(b, most, terms);
  }

  template <StatisticsLevel kLevel>
  void KeepWeight(const Updated<V>& r, uint64_t i) {
    V::Store(row_.next + i, r.weight);
    if constexpr (Master::kPaired) V::Store(row_.next_low + i, r.weight_low);
    if constexpr (kLevel == StatisticsLevel::kFull) V::Store(row_.delta + i, r.delta);
  }
  // Moment I in the form that its format encodes.
  template <int I>
  static typename V::F Encoded(const Updated<V>& r) {
    return MomentType<I>::kStoresRoot ? r.root[I] : r.moment[I];
  }
  static void RaiseTo(typename V::F x, typename V::U* most) {
    *most = V::MaxBits(*most, V::And(V::Bits(x), V::SetBits(kMagnitude)));
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
          RaiseTo(directed.m, &most);
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
