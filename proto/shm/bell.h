// Waking the other process, and waiting for it. A waiter looks for a moment, or for longer while answers have been
// coming fast, and then sleeps on a futex.
//
// A waiter spins for up to kSpin only after a wait that was shorter than that, and never where there is one processor:
// an idle rank sleeps and costs nothing, and nobody spins while the other end computes for longer than a wake-up takes.
// Two ends that both sleep would never see each other answer fast. So twice in kProbeEvery waits a waiter spins for
// longer than a wake-up takes, unless it has been waiting for milliseconds; the other end then finds the answer while
// it looks, and both are fast. The bell lies in shared memory: a peer that tampers with it delays a waiter by at most
// its timeout.
#pragma once

#include <chrono>
#include <cstdint>

#include "proto/shm/segment.h"

namespace ballast {

// Wakes the waiters. To be called after what they wait for was published; by any thread.
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

  // Waits until `ready()`, or until `timeout` has passed; returns what ready() said last.
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
