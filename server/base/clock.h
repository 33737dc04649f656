// The one clock of leases, deadlines and durations: seconds that never go back; and that of calendars, which may, and
// which nothing but what people read is told by. Thread-safe.
#pragma once

#include <chrono>

namespace ballast {

inline double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace ballast
