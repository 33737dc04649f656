// Slots of one kind in a device's memory, by number. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class NcclSlots {
 public:
  NcclSlots(std::byte* memory, uint32_t count, uint64_t slot_bytes)
      : memory_(memory), slot_bytes_(slot_bytes), taken_(count) {
    for (uint32_t slot = count; slot-- > 0;) free_.push_back(slot);
  }

  uint32_t count() const { return static_cast<uint32_t>(taken_.size()); }
  uint64_t slot_bytes() const { return slot_bytes_; }
  std::byte* at(uint32_t slot) const { return memory_ + slot * slot_bytes_; }
  // The one that was given back last; none: all are taken.
  std::optional<uint32_t> Take() {
    absl::MutexLock lock(&mu_);
    if (free_.empty()) return std::nullopt;
    const uint32_t slot = free_.back();
    free_.pop_back();
    taken_[slot] = true;
    return slot;
  }
  // This one; false: there is none, or it is taken.
  bool TakeThis(uint32_t slot) {
    absl::MutexLock lock(&mu_);
    if (slot >= taken_.size() || taken_[slot]) return false;
    std::erase(free_, slot);
    taken_[slot] = true;
    return true;
  }
  void GiveBack(uint32_t slot) {
    absl::MutexLock lock(&mu_);
    taken_[slot] = false;
    free_.push_back(slot);
  }

 private:
  std::byte* const memory_;
  const uint64_t slot_bytes_;
  mutable absl::Mutex mu_;
  std::vector<bool> taken_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
