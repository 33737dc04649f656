#include "server/ops/watchdog.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"

#include "server/base/clock.h"

namespace ballast {

Watchdog::Watchdog(Options options) : options_(std::move(options)), thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  thread_.join();
}

bool Watchdog::StopsWithin(double seconds) {
  absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(&stop_), absl::Seconds(seconds));
}

void Watchdog::Run() {
  double silent_s = 0;
  for (double looked_at_s = MonotonicSeconds(); !StopsWithin(options_.look_every_s);) {
    const absl::Status status = options_.live();
    const double now_s = MonotonicSeconds();
    // While the whole process was stopped nobody looked, so only one interval counts.
    silent_s += std::min(now_s - std::exchange(looked_at_s, now_s), 2 * options_.look_every_s);
    if (status.ok()) {
      silent_s = 0;
      if (options_.tell) options_.tell();
    } else if (options_.most_silent_s > 0 && silent_s >= options_.most_silent_s) {
      options_.on_silent(status);
    }
  }
}

}  // namespace ballast
