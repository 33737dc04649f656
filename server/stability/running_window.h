// Mean and standard deviation of the last values of a series. A copyable value; thread-compatible.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace ballast {

class RunningWindow {
 public:
  static constexpr size_t kSize = 128;

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

 private:
  std::array<double, kSize> values_ = {};
  size_t next_ = 0, count_ = 0;
};

}  // namespace ballast
