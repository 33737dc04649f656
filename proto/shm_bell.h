// Waking the other process, and waiting for it: spin while answers have been coming fast, then sleep on a futex.
//
// A waiter spins only after a wait that was over within kSpin, and never where there is one processor: what waits for
// milliseconds, as an idle rank does, sleeps at once and costs nothing, and nobody spins while an optimizer works.
// The bell lies in shared memory: a peer that tampers with it delays a waiter by at most its timeout.
#pragma once

#include <chrono>
#include <cstdint>

#include "proto/shm_segment.h"

namespace ballast {

// After what the waiter waits for was published. Any thread.
void Ring(ShmBell* bell);

// One thread's waiting at one bell, at which others may wait too.
class ShmWaiter {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kSpin = std::chrono::microseconds(30);

  explicit ShmWaiter(ShmBell* bell);

  // Until `ready()`, or `timeout` has passed; what ready() said last.
  template <typename Ready>
  bool Await(Clock::duration timeout, Ready ready) {
    if (ready()) return true;
    const Clock::time_point began = Clock::now();
    while (spins_ && Clock::now() - began < kSpin) {
      for (int i = 0; i < 16; ++i) {
        if (ready()) return true;
      }
    }
    const bool woken = Sleep(began + timeout, ready);
    spins_ = several_processors_ && Clock::now() - began < kSpin * 3;  // a wake-up is most of it
    return woken;
  }

 private:
  template <typename Ready>
  bool Sleep(Clock::time_point deadline, Ready ready) {
    bell_->asleep.fetch_add(1);
    bool is_ready = false;
    do {
      const uint32_t seen = bell_->rings.load();
      is_ready = ready();
      if (!is_ready) SleepUnlessRung(seen, deadline - Clock::now());
    } while (!is_ready && Clock::now() < deadline);
    bell_->asleep.fetch_sub(1);
    return is_ready || ready();
  }
  void SleepUnlessRung(uint32_t seen, Clock::duration at_most);

  ShmBell* const bell_;
  const bool several_processors_;
  bool spins_ = false;
};

}  // namespace ballast
