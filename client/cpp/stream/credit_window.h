// How many bytes of gradients may be under way on one stream, and how many gradients were sent on it. The daemon bounds
// what it must buffer, and the transport has so many slots. A value.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace ballast {

class CreditWindow {
 public:
  // under_way_bytes: how much of the window is under way already.
  explicit CreditWindow(uint64_t window_bytes = 0, uint64_t under_way_bytes = 0)
      : window_(window_bytes), under_way_(under_way_bytes) {}

  // Whether a chunk may go. One larger than the whole window may go when nothing else is under way. The last slot is
  // for the chunk that the daemon wants.
  bool Allows(uint64_t bytes) const { return (under_way_ + bytes <= window_ || under_way_ == 0) && slots_free_ > 1; }
  // Whether the chunk that the daemon wants may go; it may exceed the window.
  bool AllowsWanted() const { return slots_free_ > 0; }
  void set_slots_free(uint64_t slots) { slots_free_ = slots; }
  // To be called for each chunk sent, also for one that exceeds the window.
  void Spend(uint64_t bytes) {
    under_way_ += bytes;
    ++sent_;
  }
  void Return(uint64_t bytes) { under_way_ -= std::min(bytes, under_way_); }
  // The number of gradient chunks sent so far; Credit.acknowledged counts the same.
  uint64_t sent() const { return sent_; }

 private:
  uint64_t window_;
  uint64_t under_way_;
  uint64_t slots_free_ = std::numeric_limits<uint64_t>::max();
  uint64_t sent_ = 0;
};

}  // namespace ballast
