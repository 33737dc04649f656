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

// The row type of a rule with these formats; rules with the same slots share it.
template <class L, class Rule, class Master, class State, class Numbers>
struct RowFor;
template <class L, class Rule, class Master, class State, int... I>
struct RowFor<L, Rule, Master, State, std::integer_sequence<int, I...>> {
  using Type = CpuRow<L, Master, SlotAt<Rule, State, I>...>;
};

template <class L, class Rule, class Master, class State>
class CpuKernel {
 public:
  CpuKernel(const Update& u, GradientLoader load) : u_(u), row_(u, load) {
    for (int i = 0; i < kMaxConstants; ++i) constants_[i] = L::Set(u.constants[i]);
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
  static constexpr int kSlotCount = static_cast<int>(std::size(Rule::kSlots));
  using Row = typename RowFor<L, Rule, Master, State, std::make_integer_sequence<int, kSlotCount>>::Type;
  template <int I>
  using SlotType = SlotAt<Rule, State, I>;

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
        typename L::F old[kSlotCount][kVectors<L>];
        (row_.template DecodeSlot<I>(std::get<I>(decoders).At(b), first + b * kBlock, old[I]), ...);
        typename L::U most = L::SetBits(0), slot_most[kSlotCount];
        std::fill(slot_most, slot_most + kSlotCount, most);
        for (int j = 0; j < kVectors<L>; ++j) {
          const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * L::kWidth;
          Element<L> e = row_.LoadWeight(first + i);
          e.grad = L::Load(row_.grad + i);
          ((e.slot[I] = old[I][j]), ...);
          const Updated<L> r = Rule::template Apply<L>(constants_, e);
          KeepWeight<kTerms>(r, i, &most);
          (KeepSlot<I>(r, i, &slot_most[I]), ...);
        }
        row_.most[0].of[b] = L::Largest(most);
        ((row_.most[1 + I].of[b] = L::Largest(slot_most[I])), ...);
      }
      (typename Row::SlotNumbers());
    }
  }
  template <bool kTerms>
  void KeepWeight(const Updated<L>& r, uint64_t i, typename L::U* most) {
    L::Store(row_.next + i, r.weight);
    if constexpr (Master::kPaired) L::Store(row_.next_low + i, r.weight_low);
    if constexpr (kTerms) L::Store(row_.delta + i, r.delta);
    if constexpr (kTerms && Rule::kHasRms) L::Store(row_.rms + i, r.rms_term);
    *most = L::MaxBits(*most, L::And(L::Bits(r.weight), L::SetBits(kMagnitude)));
  }
  template <int I>
  void KeepSlot(const Updated<L>& r, uint64_t i, typename L::U* most) {
    const auto x = SlotType<I>::kStoresRoot ? r.root[I] : r.slot[I];
    L::Store(row_.slot[I] + i, x);
    *most = L::MaxBits(*most, L::And(L::Bits(x), L::SetBits(kMagnitude)));
  }

  void MeasureRow(uint64_t first, uint64_t count) {
    row_.StartRow(first, count);
    const auto decoders = row_.template Decoder<kSecondMoment>(first);
    for (uint64_t b = 0; b < kRowBlocks; ++b) {
      typename L::F v[kVectors<L>];
      row_.template DecodeSlot<kSecondMoment>(decoders.At(b), first + b * kBlock, v);
      auto most = L::SetBits(0);
      for (int j = 0; j < kVectors<L>; ++j) {
        const uint64_t i = b * kBlock + static_cast<uint64_t>(j) * L::kWidth;
        const auto measured = Rule::template Measure<L>(constants_, L::Load(row_.grad + i), v[j]);
        L::Store(row_.rms + i, measured.term);
        most = L::MaxBits(most, L::Bits(measured.v));
      }
      const bool storable = L::Largest(most) <= std::bit_cast<uint32_t>(kLargestValue<SlotType<kSecondMoment>>);
      if (row_.rejected(b) || !storable) std::fill_n(row_.rms + b * kBlock, kBlock, 0.0f);
    }
    std::fill(row_.rms + count, row_.rms + kRow, 0.0f);
    for (uint64_t i = 0; i < kRow; i += L::kWidth) measured_.template Add<L>(i, L::Load(row_.rms + i));
  }
  static constexpr int kSecondMoment = 1;

  const Update& u_;
  Row row_;
  typename L::F constants_[kMaxConstants];
  TileSum measured_;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
