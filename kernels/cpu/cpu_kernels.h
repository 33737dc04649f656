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
    for (int i = 0; i < kMaxConstants; ++i) constants_[i] = V::Set(u.constants[i]);
  }

  TileStatistics UpdateTile(uint64_t tile) {
    row_.StartTile();
    ForEachRow(tile, [this](uint64_t first, uint64_t count) {
      row_.StartRow(first, count);
      u_.statistics == StatisticsLevel::kOff ? ApplyRow<false>(first) : ApplyRow<true>(first);
      row_.FinishRow(first, count);
    });
    return row_.FinishTile();
  }

  // The first pass of a rule that takes two.
  float MeasureTile(uint64_t tile) {
    measured_.Clear();
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

  // Applies the rule to the stored values and the gradients. kTerms: also computes the terms of the core statistics.
  template <bool kTerms>
  void ApplyRow(uint64_t first) {
    const auto decoders = row_.Decoders(first);
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      [&]<int... I>(std::integer_sequence<int, I...>) {
        typename V::F old[kMomentCount][kVectors<V>];
        (row_.template DecodeMoment<I>(std::get<I>(decoders).At(b), first + b * kBlock, old[I]), ...);
        typename V::U most = V::SetBits(0), moment_most[kMomentCount];
        std::fill(moment_most, moment_most + kMomentCount, most);
        for (int j = 0; j < kVectors<V>; ++j) {
          const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
          Element<V> e = row_.LoadWeight(first + i);
          e.grad = V::Load(row_.grad + i);
          ((e.moment[I] = old[I][j]), ...);
          const Updated<V> r = Rule::template Apply<V>(constants_, e);
          KeepWeight<kTerms>(r, i, &most);
          (KeepMoment<I>(r, i, &moment_most[I]), ...);
        }
        row_.most[0].of[b] = V::Largest(most);
        ((row_.most[1 + I].of[b] = V::Largest(moment_most[I])), ...);
      }
      (typename Row::MomentNumbers());
    }
  }
  template <bool kTerms>
  void KeepWeight(const Updated<V>& r, uint64_t i, typename V::U* most) {
    V::Store(row_.next + i, r.weight);
    if constexpr (Master::kPaired) V::Store(row_.next_low + i, r.weight_low);
    if constexpr (kTerms) V::Store(row_.delta + i, r.delta);
    if constexpr (kTerms && Rule::kHasRms) V::Store(row_.rms + i, r.rms_term);
    *most = V::MaxBits(*most, V::And(V::Bits(r.weight), V::SetBits(kMagnitude)));
  }
  template <int I>
  void KeepMoment(const Updated<V>& r, uint64_t i, typename V::U* most) {
    const auto x = MomentType<I>::kStoresRoot ? r.root[I] : r.moment[I];
    V::Store(row_.moment[I] + i, x);
    *most = V::MaxBits(*most, V::And(V::Bits(x), V::SetBits(kMagnitude)));
  }

  void MeasureRow(uint64_t first, uint64_t count) {
    row_.StartRow(first, count);
    const auto decoders = row_.template Decoder<kSecondMoment>(first);
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      typename V::F v[kVectors<V>];
      row_.template DecodeMoment<kSecondMoment>(decoders.At(b), first + b * kBlock, v);
      auto most = V::SetBits(0);
      for (int j = 0; j < kVectors<V>; ++j) {
        const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * V::kWidth;
        const auto measured = Rule::template Measure<V>(constants_, V::Load(row_.grad + i), v[j]);
        V::Store(row_.rms + i, measured.term);
        most = V::MaxBits(most, V::Bits(measured.v));
      }
      const bool storable = V::Largest(most) <= std::bit_cast<uint32_t>(kLargestValue<MomentType<kSecondMoment>>);
      if (row_.rejected(b) || !storable) std::fill_n(row_.rms + b * kBlock, kBlock, 0.0f);
    }
    std::fill(row_.rms + count, row_.rms + kRow, 0.0f);
    for (uint64_t i = 0; i < kRow; i += V::kWidth) measured_.template Add<V>(i, V::Load(row_.rms + i));
  }
  static constexpr int kSecondMoment = 1;

  const Update& u_;
  Row row_;
  typename V::F constants_[kMaxConstants];
  TileSum measured_;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
