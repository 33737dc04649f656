#include "proto/shm/slots.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace ballast {

ShmLender::ShmLender(const ShmSlots& slots)
    : slots_(slots),
      free_(slots.marks.size()),
      out_(slots.marks.size() + 1),
      lent_(slots.marks.size()),
      kept_(slots.marks.size()) {
  std::iota(free_.rbegin(), free_.rend(), 0u);
  const auto none = static_cast<uint32_t>(lent_.size());
  out_[none] = {none, none};
}

uint64_t ShmLender::free() const {
  const uint64_t out = all_lent_.load(std::memory_order_relaxed) - returned();
  const uint64_t taken = std::max(out, all_kept_.load(std::memory_order_relaxed));
  return lent_.size() - std::min<uint64_t>(taken, lent_.size());
}

void ShmLender::Keep(uint32_t slot) {
  if (!kept_[slot]) all_kept_.fetch_add(1, std::memory_order_relaxed);
  kept_[slot] = true;
}

void ShmLender::Release(uint32_t slot) {
  if (kept_[slot]) all_kept_.fetch_sub(1, std::memory_order_relaxed);
  kept_[slot] = false;
}

bool ShmLender::IsBack(uint32_t slot) const {
  return !kept_[slot] && slots_.marks[slot].load(std::memory_order_acquire) == lent_[slot];
}

uint32_t ShmLender::TakeBack(uint32_t slot) {
  const Links links = out_[slot];
  out_[links.before].after = links.after;
  out_[links.after].before = links.before;
  ++taken_back_;
  return slot;
}

std::optional<uint32_t> ShmLender::Take() {
  const auto none = static_cast<uint32_t>(lent_.size());
  if (oldest() != none && IsBack(oldest())) return TakeBack(oldest());
  if (!free_.empty()) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  if (returned() == taken_back_) return std::nullopt;
  for (uint32_t slot = oldest(); slot != none; slot = out_[slot].after) {
    if (IsBack(slot)) return TakeBack(slot);
  }
  return std::nullopt;
}

void ShmLender::Lend(uint32_t slot) {
  const auto none = static_cast<uint32_t>(lent_.size());
  const uint32_t newest = out_[none].before;
  out_[slot] = {newest, none};
  out_[newest].after = out_[none].before = slot;
  ++lent_[slot];
  all_lent_.fetch_add(1, std::memory_order_relaxed);
}

void ShmLender::PutBack(uint32_t slot) { free_.push_back(slot); }

absl::StatusOr<absl::Span<const std::byte>> ShmBorrower::Borrow(uint32_t slot, uint64_t bytes) {
  if (slot >= slots() || bytes > slots_.slot_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a payload of ", bytes, " bytes in slot ", slot,
                                                   " of the shared-memory transport, which has ", slots(), " slots of ",
                                                   slots_.slot_bytes, " bytes"));
  }
  if (used_[slot].exchange(true, std::memory_order_acquire)) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", slot, " of the shared-memory transport was named again before it was given back"));
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
