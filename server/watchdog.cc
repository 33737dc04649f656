#include "server/watchdog.h"

#include <utility>

#include "absl/time/time.h"

#include "server/clock.h"

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
  double last_ok_s = MonotonicSeconds();
  while (!StopsWithin(options_.look_every_s)) {
    const absl::Status status = options_.live();
    const double now_s = MonotonicSeconds();
    if (status.ok()) {
      last_ok_s = now_s;
      if (options_.tell) options_.tell();
    } else if (options_.most_silent_s > 0 && now_s - last_ok_s >= options_.most_silent_s) {
      options_.on_silent(status);
    }
  }
}

}  // namespace ballast
