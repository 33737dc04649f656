// Maxima over the last 60 seconds, one for each layer: a gauge that is only true at one step would be missed by a
// scrape every 15 s. Kept by time and not "since the last scrape", which two scrapers would spoil for each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

// Resolution: one second. The lock is held for one pass over the ring. Thread-safe.
class RecentMax {
 public:
  explicit RecentMax(size_t layers) : layers_(layers) {}

  // now_s: any clock that never goes back.
  void Observe(size_t layer, double value, double now_s);
  // Never less than the last value, however old; none before the first.
  std::optional<double> Max(size_t layer, double now_s) const;

 private:
  static constexpr int64_t kSeconds = 60;
  struct Slot {
    int64_t second = -kSeconds;
    double max = 0;
  };
  struct Layer {
    std::optional<double> last;
    std::array<Slot, kSeconds> slots;  // that of a second is at its remainder
  };

  mutable absl::Mutex mutex_;
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast
