#include "proto/shm/bell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace ballast {
namespace {

bool SeveralProcessors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) > 1;
}

}  // namespace

// The waiter counts itself in, reads `rings`, then looks; here `rings` changes, then the count is read. Whoever comes
// second sees the other.
void Ring(ShmBell* bell) {
  bell->rings.fetch_add(1);
  if (bell->asleep.load() == 0) return;
  syscall(SYS_futex, &bell->rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

ShmWaiter::ShmWaiter(ShmBell* bell) : bell_(bell), several_processors_(SeveralProcessors()) {}

ShmWaiter::Clock::duration ShmWaiter::Patience() {
  if (took_ < kSpin) {
    slow_waits_ = kProbeEvery - 1;  // should it be slow next time, it may have been by chance
    return kSpin;
  }
  slow_waits_ = (slow_waits_ + 1) % kProbeEvery;
  return slow_waits_ < 2 && took_ < kSlow ? Clock::duration(kProbe) : Clock::duration(kLook);
}

void ShmWaiter::SleepUnlessRung(uint32_t seen, Clock::duration at_most) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(at_most).count();
  if (ns <= 0) return;
  const timespec timeout{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  // Woken, rung before, interrupted or too late: the caller looks again in any case.
  syscall(SYS_futex, &bell_->rings, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace ballast
