// Who has which slot of a segment. The lender fills a slot and names it in a record. The borrower reads it and gives it
// back, in any order, by a mark that counts how often it gave the slot back. Each end keeps its own account outside the
// segment: an end that writes a wrong mark has its own payloads overwritten, and harms nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shm/segment.h"

namespace ballast {

// Slots of one kind.
struct ShmSlots {
  std::byte* memory = nullptr;
  uint64_t slot_bytes = 0;
  absl::Span<std::atomic<uint32_t>> marks;
  ShmCounter* returned = nullptr;
};
// gpu: as in ShmSegment.
inline ShmSlots GradientSlots(const ShmSegment& s, std::byte* gpu = nullptr) {
  return {s.gradient_slots(gpu), s.shape().gradient_slot_bytes, s.gradient_marks(), &s.control().gradients_returned};
}
inline ShmSlots WeightSlots(const ShmSegment& s, std::byte* gpu = nullptr) {
  return {s.weight_slots(gpu), s.shape().weight_slot_bytes, s.weight_marks(), &s.control().weights_returned};
}

// Thread-compatible, but for free(): any thread.
class ShmLender {
 public:
  explicit ShmLender(const ShmSlots& slots);

  uint64_t slot_bytes() const { return slots_.slot_bytes; }
  absl::Span<std::byte> at(uint32_t slot) const {
    return {slots_.memory + slot * slots_.slot_bytes, slots_.slot_bytes};
  }
  // How many slots are free, as far as the borrower says; never more than there are. A kept slot that is back may count
  // as free while others are out.
  uint64_t free() const;
  uint64_t returned() const { return slots_.returned->value.load(std::memory_order_acquire); }
  // A free slot, to be filled: the one that was lent first, if it is back; else the lowest that was never lent, so that
  // no more memory is touched than is needed; else any that is back. None: all are out. If slots come back in the order
  // they went, or none came back, this looks at one slot only.
  std::optional<uint32_t> Take();
  void Lend(uint32_t slot);     // call it before the slot's record is written
  void PutBack(uint32_t slot);  // frees a slot that was taken and is not lent after all
  // Until Release the slot is not taken again, though it is back: what is in it may be needed once more.
  void Keep(uint32_t slot);
  void Release(uint32_t slot);

 private:
  // The slots that are lent, oldest first, as a ring by slot; the entry whose index is the number of slots comes before
  // the first.
  struct Links {
    uint32_t before = 0, after = 0;
  };
  uint32_t oldest() const { return out_.back().after; }
  bool IsBack(uint32_t slot) const;
  uint32_t TakeBack(uint32_t slot);

  const ShmSlots slots_;
  std::vector<uint32_t> free_;  // never lent, or put back; the next last
  std::vector<Links> out_;
  std::vector<uint32_t> lent_;  // how often
  std::vector<bool> kept_;
  std::atomic<uint64_t> all_kept_ = 0;
  uint64_t taken_back_ = 0;
  std::atomic<uint64_t> all_lent_ = 0;
};

// Thread-safe; one thread borrows.
class ShmBorrower {
 public:
  explicit ShmBorrower(const ShmSlots& slots)
      : slots_(slots), used_(new std::atomic<bool>[slots.marks.size()]()), given_back_(slots.marks.size()) {}

  // The payload of a record. INVALID_ARGUMENT: there is no such slot, the payload does not fit into it, or it is
  // already borrowed.
  absl::StatusOr<absl::Span<const std::byte>> Borrow(uint32_t slot, uint64_t bytes);
  // Call it once for each Borrow. The caller rings the bell.
  void GiveBack(uint32_t slot);
  uint64_t slots() const { return slots_.marks.size(); }
  uint64_t borrowed() const { return borrowed_.load(std::memory_order_relaxed); }

 private:
  const ShmSlots slots_;
  const std::unique_ptr<std::atomic<bool>[]> used_;
  std::vector<uint32_t> given_back_;  // of each its own count; guarded by used_
  std::atomic<uint64_t> borrowed_ = 0;
};

}  // namespace ballast
