// What of the gradients may be under way on one stream, and how many were sent on it: the daemon's bound on what it
// must buffer. A value.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ballast {

class CreditWindow {
 public:
  // Of the window, so many bytes are under way already.
  explicit CreditWindow(uint64_t window_bytes = 0, uint64_t under_way_bytes = 0)
      : window_(window_bytes), under_way_(under_way_bytes) {}

  // A chunk larger than the whole window may go when nothing else is under way.
  bool Allows(uint64_t bytes) const { return under_way_ + bytes <= window_ || under_way_ == 0; }
  // Also what goes beyond the window, for the daemon wants it.
  void Spend(uint64_t bytes) {
    under_way_ += bytes;
    ++sent_;
  }
  void Return(uint64_t bytes) { under_way_ -= std::min(bytes, under_way_); }
  // Gradients so far; Credit.acknowledged counts the same.
  uint64_t sent() const { return sent_; }

 private:
  uint64_t window_;
  uint64_t under_way_;
  uint64_t sent_ = 0;
};

}  // namespace ballast
