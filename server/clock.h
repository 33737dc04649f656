// The one clock of leases, deadlines and durations: seconds that never go back. Thread-safe.
#pragma once

#include <chrono>

namespace ballast {

inline double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace ballast
