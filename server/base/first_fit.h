// Keeps a size for each position, and finds the first position, from a given one on, whose size is at most a given one. A
// value; the cost of a call is logarithmic in the number of positions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace ballast {

class FirstFit {
 public:
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();  // the size of an empty position

  explicit FirstFit(size_t positions = 0) : leaves_(std::bit_ceil(std::max<size_t>(positions, 1))) {
    least_.assign(2 * leaves_, kNone);
  }
  static constexpr uint64_t Bytes(uint64_t positions) { return 2 * std::bit_ceil(positions) * sizeof(uint64_t); }

  void Set(size_t position, uint64_t size) {
    size_t node = leaves_ + position;
    least_[node] = size;
    while (node > 1) {
      node /= 2;
      least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
    }
  }
  // most: below kNone.
  std::optional<size_t> First(uint64_t most, size_t from = 0) const {
    if (from >= leaves_ || least_[1] > most) return std::nullopt;
    size_t node = leaves_ + from;
    while (least_[node] > most) {  // on to the next node to the right, as high up as it begins there
      while (node % 2 == 1) node /= 2;
      if (node == 0) return std::nullopt;
      ++node;
    }
    while (node < leaves_) node = least_[2 * node] <= most ? 2 * node : 2 * node + 1;
    return node - leaves_;
  }
  void Clear() { std::fill(least_.begin(), least_.end(), kNone); }

 private:
  size_t leaves_;
  std::vector<uint64_t> least_;  // of a node's positions; the root is 1, its halves 2 and 3
};

}  // namespace ballast
