// The clocks. MonotonicSeconds never goes back; leases, deadlines and durations use it. CoarseSeconds is the same clock as
// of the kernel's last tick, at most 10 ms ago: it takes some 5 ns, where MonotonicSeconds takes 100 in a virtual machine,
// and is for what is asked with each message. UnixSeconds is the time of day, which may go back; it is only for times that
// people read. Thread-safe.
#pragma once

#include <chrono>
#include <ctime>

namespace ballast {

inline double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double CoarseSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace ballast
