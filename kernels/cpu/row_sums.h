// The sums over a tile that an update takes row by row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/math/statistics.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// kSums sums over a tile, in TileSum's order. Each has two sets of lanes, of the rows before the one in hand and with it: a
// row's terms are added from one set to the other, so that those of a block can be taken back when the row is finished.
template <int kSums>
class RowSums {
  // Apart so that no two lie a multiple of 4096 bytes from each other (cpu_row.h).
  static constexpr uint64_t kPitch = kRow + 16;

 public:
  // Where the row in hand adds. Valid until FinishRow.
  class Lanes {
   public:
    Lanes(const float* before, float* with) : before_(before), with_(with) {}
    // Adds one vector of terms at lane i of sum number `sum`. Once for each lane of a row.
    template <class V>
    void Add(int sum, uint64_t i, typename V::F terms) const {
      const uint64_t at = static_cast<uint64_t>(sum) * kPitch + i;
      V::Store(with_ + at, V::Add(V::Load(before_ + at), terms));
    }

   private:
    const float* before_;
    float* with_;
  };

  void Clear() { std::memset(lanes_[before_], 0, sizeof lanes_[before_]); }
  Lanes lanes() { return {lanes_[before_][0], lanes_[1 - before_][0]}; }

  // Takes back what the row in hand added at lanes [i, i + count).
  void TakeBack(uint64_t i, uint64_t count) {
    for (int sum = 0; sum < kSums; ++sum) std::copy_n(lanes_[before_][sum] + i, count, lanes_[1 - before_][sum] + i);
  }
  void FinishRow() { before_ = 1 - before_; }

  float Total(int sum) const { return TotalOf<kRow>(lanes_[before_][sum]); }

 private:
  int before_ = 0;
  alignas(64) float lanes_[2][kSums][kPitch] = {};  // a sum that nothing is added to stays 0 in both sets
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
