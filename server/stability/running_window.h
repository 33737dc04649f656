// Mean and standard deviation, median and spread of the last values of a series. A copyable value; thread-compatible.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ballast {

class RunningWindow {
 public:
  static constexpr size_t kSize = 128;

  RunningWindow() = default;
  // One that goes on from another's values() and next(): at most kSize, and below kSize.
  RunningWindow(std::span<const double> values, size_t next) : next_(next), count_(values.size()) {
    std::copy(values.begin(), values.end(), values_.begin());
  }
  // As they are stored: their order decides how sums of them are rounded.
  std::span<const double> values() const { return std::span(values_).first(count_); }
  size_t next() const { return next_; }

  void Add(double value) {
    values_[next_] = value;
    next_ = (next_ + 1) % kSize;
    count_ = std::min(count_ + 1, kSize);
  }
  // Until the window is half full, its values are not worth acting on.
  bool half_full() const { return count_ >= kSize / 2; }
  double mean() const {
    double sum = 0;
    for (size_t i = 0; i < count_; ++i) sum += values_[i];
    return count_ == 0 ? 0 : sum / static_cast<double>(count_);
  }
  // The deviation of the values themselves (divisor n). Computed in two passes, since the values may lie close together
  // and far from 0.
  double deviation() const {
    const double middle = mean();
    double sum = 0;
    for (size_t i = 0; i < count_; ++i) sum += (values_[i] - middle) * (values_[i] - middle);
    return count_ == 0 ? 0 : std::sqrt(sum / static_cast<double>(count_));
  }

  // Of an even number the mean of the two in the middle; 0 of none.
  double median() const { return MedianOf(values_); }
  // The median of the values' distances from their median, as the standard deviation of a normal distribution that has
  // it; a few outliers do not move it.
  double spread() const {
    const double middle = median();
    std::array<double, kSize> distances = values_;
    for (size_t i = 0; i < count_; ++i) distances[i] = std::abs(values_[i] - middle);
    return kOfNormal * MedianOf(distances);
  }

 private:
  static constexpr double kOfNormal = 1.4826022185056018;  // 1 / the normal distribution's third quartile

  double MedianOf(std::array<double, kSize> values) const {
    if (count_ == 0) return 0;
    const auto end = values.begin() + static_cast<ptrdiff_t>(count_);
    std::sort(values.begin(), end);
    return (values[(count_ - 1) / 2] + values[count_ / 2]) / 2;
  }

  std::array<double, kSize> values_ = {};
  size_t next_ = 0, count_ = 0;
};

}  // namespace ballast
