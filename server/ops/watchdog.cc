#include "server/ops/watchdog.h"

#include <algorithm>
#include <utility>

#include "server/base/clock.h"

namespace ballast {

Watchdog::Watchdog(Options options) : options_(std::move(options)), thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  stop_.Raise();
  thread_.join();
}

void Watchdog::Run() {
  double silent_s = 0;
  for (double looked_at_s = MonotonicSeconds(); !stop_.RaisedWithin(options_.look_every_s);) {
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
