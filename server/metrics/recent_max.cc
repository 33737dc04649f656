#include "server/metrics/recent_max.h"

#include <algorithm>

namespace ballast {

void RecentMax::Observe(size_t layer, double value, double now_s) {
  const auto second = static_cast<int64_t>(now_s);
  absl::MutexLock lock(&mutex_);
  layers_[layer].last = value;
  Slot& slot = layers_[layer].slots[static_cast<size_t>(second % kSeconds)];
  slot.max = slot.second == second ? std::max(slot.max, value) : value;
  slot.second = second;
}

std::optional<double> RecentMax::Max(size_t layer, double now_s) const {
  const auto second = static_cast<int64_t>(now_s);
  absl::MutexLock lock(&mutex_);
  std::optional<double> max = layers_[layer].last;
  if (!max) return max;
  for (const Slot& slot : layers_[layer].slots) {
    if (slot.second > second - kSeconds) max = std::max(*max, slot.max);
  }
  return max;
}

}  // namespace ballast
