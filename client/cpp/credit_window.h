// How many bytes of gradients may be under way: the daemon's bound on what it must buffer. A value.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ballast {

class CreditWindow {
 public:
  explicit CreditWindow(uint64_t window_bytes = 0) : window_(window_bytes), free_(window_bytes) {}
  // Of which so many are taken already.
  CreditWindow(uint64_t window_bytes, uint64_t taken_bytes) : CreditWindow(window_bytes) { Spend(taken_bytes); }

  // A chunk larger than the whole window may go when nothing else is under way.
  bool Allows(uint64_t bytes) const { return bytes <= free_ || free_ == window_; }
  void Spend(uint64_t bytes) { free_ -= std::min(bytes, free_); }
  void Return(uint64_t bytes) { free_ = std::min(window_, free_ + bytes); }

 private:
  uint64_t window_;
  uint64_t free_;
};

}  // namespace ballast
