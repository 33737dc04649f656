// Waking the other process, and waiting for it: look for a moment, and for longer while answers have been coming fast,
// then sleep on a futex.
//
// A waiter spins for up to kSpin only after a wait that was shorter than that, and never where there is one processor:
// an idle rank sleeps and costs nothing, and nobody spins while the other end computes for longer than a wake-up takes.
// As two that sleep never see each other answer fast, a waiter outlasts a wake-up twice in kProbeEvery waits, unless it
// waits for milliseconds; the other end, in its moment of looking, then finds the answer there, and both are fast. The
// bell lies in shared memory: a peer that tampers with it delays a waiter by at most its timeout.
#pragma once

#include <chrono>
#include <cstdint>

#include "proto/shm/segment.h"

namespace ballast {

// After what the waiter waits for was published. Any thread.
void Ring(ShmBell* bell);

// One thread's waiting at one bell, at which others may wait too.
class ShmWaiter {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kLook = std::chrono::microseconds(10), kSpin = std::chrono::microseconds(20);
  // A wake-up across processors takes some 60 us in a virtual machine.
  static constexpr auto kProbe = std::chrono::microseconds(100);
  static constexpr auto kSlow = std::chrono::milliseconds(1);
  static constexpr int kProbeEvery = 64;

  explicit ShmWaiter(ShmBell* bell);

  // Until `ready()`, or `timeout` has passed; what ready() said last.
  template <typename Ready>
  bool Await(Clock::duration timeout, Ready ready) {
    if (ready()) return true;
    const Clock::time_point began = Clock::now();
    const bool found = Spin(began + Patience(), ready) || Sleep(began + timeout, ready);
    took_ = Clock::now() - began;
    return found;
  }

 private:
  template <typename Ready>
  bool Spin(Clock::time_point until, Ready ready) {
    while (several_processors_ && Clock::now() < until) {
      for (int i = 0; i < 16; ++i) {
        if (ready()) return true;
      }
    }
    return false;
  }
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
  // How long to spin this time.
  Clock::duration Patience();

  ShmBell* const bell_;
  const bool several_processors_;
  Clock::duration took_ = kSlow;  // the last wait
  int slow_waits_ = 0;
};

}  // namespace ballast
