#include "proto/shm_slots.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ballast {

uint64_t ShmLender::free() const {
  const uint64_t out = all_lent_.load(std::memory_order_relaxed) - returned();
  return state_.size() - std::min<uint64_t>(out, state_.size());
}

std::optional<uint32_t> ShmLender::Take() {
  for (uint32_t slot = 0; slot < state_.size(); ++slot) {
    const bool back = state_[slot] == State::kLent && slots_.marks[slot].load(std::memory_order_acquire) == lent_[slot];
    if (state_[slot] != State::kFree && !back) continue;
    state_[slot] = State::kTaken;
    return slot;
  }
  return std::nullopt;
}

void ShmLender::Lend(uint32_t slot) {
  state_[slot] = State::kLent;
  ++lent_[slot];
  all_lent_.fetch_add(1, std::memory_order_relaxed);
}

void ShmLender::PutBack(uint32_t slot) { state_[slot] = State::kFree; }

absl::StatusOr<absl::Span<const std::byte>> ShmBorrower::Borrow(uint32_t slot, uint64_t bytes) {
  if (slot >= slots() || bytes > slots_.slot_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a payload of ", bytes, " bytes in slot ", slot,
                                                   " of the shared-memory lane, which has ", slots(), " slots of ",
                                                   slots_.slot_bytes, " bytes"));
  }
  if (used_[slot].exchange(true, std::memory_order_acquire)) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", slot, " of the shared-memory lane was named again before it was given back"));
  }
  borrowed_.fetch_add(1, std::memory_order_relaxed);
  return absl::MakeConstSpan(slots_.memory + slot * slots_.slot_bytes, bytes);
}

void ShmBorrower::GiveBack(uint32_t slot) {
  const uint32_t mark = ++given_back_[slot];
  borrowed_.fetch_sub(1, std::memory_order_relaxed);
  used_[slot].store(false, std::memory_order_release);
  slots_.marks[slot].store(mark, std::memory_order_release);
  slots_.returned->value.fetch_add(1, std::memory_order_release);
}

}  // namespace ballast
