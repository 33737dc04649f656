// The two clocks. MonotonicSeconds never goes back; leases, deadlines and durations use it. UnixSeconds is the time of
// day, which may go back; it is only for times that people read. Thread-safe.
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
