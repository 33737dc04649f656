// The largest of the last values of a series, 128 to 143 of them, kept as the maxima of blocks of 16. A copyable value;
// thread-compatible.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace ballast {

class RunningMax {
 public:
  static constexpr size_t kBlock = 16, kBlocks = 8, kLeast = 64;

  RunningMax() = default;
  // One that goes on from another's blocks() and in_last(): at most kBlocks + 1, and at most kBlock, which is 0 only
  // where there is no block.
  RunningMax(std::vector<double> blocks, size_t in_last) : blocks_(std::move(blocks)), in_last_(in_last) {}
  // Oldest first; in_last() values are in the last one.
  const std::vector<double>& blocks() const { return blocks_; }
  size_t in_last() const { return in_last_; }

  void Add(double value) {
    if (blocks_.empty() || in_last_ == kBlock) {
      if (blocks_.size() == kBlocks + 1) blocks_.erase(blocks_.begin());
      blocks_.push_back(value);
      in_last_ = 0;
    }
    blocks_.back() = std::max(blocks_.back(), value);
    ++in_last_;
  }
  // None before there are kLeast values.
  std::optional<double> max() const {
    if (blocks_.empty() || (blocks_.size() - 1) * kBlock + in_last_ < kLeast) return std::nullopt;
    return *std::max_element(blocks_.begin(), blocks_.end());
  }

 private:
  std::vector<double> blocks_;
  size_t in_last_ = 0;
};

}  // namespace ballast
