// The clock that nobody sets. Waits and deadlines of the client go by it: the time of day may be set back or forward while a
// connection is away. Its times mean something to each other alone.
#pragma once

#include <chrono>
#include <ctime>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ballast {

inline absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// The same, and it goes on while the machine is suspended: since when a daemon elsewhere has been doing something.
inline absl::Time BootNow() {
  timespec now = {};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return absl::TimeFromTimespec(now);
}

// What gRPC is told of a time by that clock: it takes a time of day, and makes one of the other kind of it at once.
inline std::chrono::system_clock::time_point DeadlineAt(absl::Time steady) {
  return absl::ToChronoTime(absl::Now() + (steady - SteadyNow()));
}

}  // namespace ballast
