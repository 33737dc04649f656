// Whether the other end still runs, since a process that is stopped closes no socket. Each end counts up with every
// record that it reads, and at least once a second while it waits for one. An end that does not for kDead is lost;
// gRPC's keep-alive takes as long.
//
// Thread-compatible; one for each end.
#pragma once

#include <chrono>

#include "proto/shm/segment.h"

namespace ballast {

class ShmPulse {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kDead = std::chrono::seconds(8);

  ShmPulse(ShmCounter* own, const ShmCounter* other) : own_(own), other_(other) {}

  void Beat() { own_->value.fetch_add(1, std::memory_order_relaxed); }
  bool Lost(Clock::time_point now = Clock::now()) {
    const uint64_t beats = other_->value.load(std::memory_order_relaxed);
    if (beats != seen_) {
      seen_ = beats;
      seen_at_ = now;
    }
    return now - seen_at_ > kDead;
  }

 private:
  ShmCounter* const own_;
  const ShmCounter* const other_;
  uint64_t seen_ = 0;
  Clock::time_point seen_at_ = Clock::now();
};

}  // namespace ballast
