#include "server/store/snapshot_ring.h"

#include <algorithm>
#include <utility>

#include "server/base/status_macros.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<SnapshotRing>> SnapshotRing::Create(const RunSpec* spec, ParameterStore* store) {
  std::unique_ptr<SnapshotRing> ring(new SnapshotRing(spec, store));
  const size_t tensors = spec->tensors.size();
  for (uint32_t s = 0; s < spec->snapshots; ++s) {
    ASSIGN_OR_RETURN(StoreImage image, store->NewImage());
    ring->slots_.push_back({.image = std::move(image),
                            .memory = std::nullopt,
                            .counts = std::vector<ParameterStore::UpdateCount>(tensors)});
  }
  ring->saved_.resize(tensors);
  return ring;
}

uint64_t SnapshotRing::bytes() const {
  uint64_t sum = 0;
  for (const Slot& slot : slots_) sum += slot.image.bytes();
  return sum;
}

SnapshotRing::Slot* SnapshotRing::Oldest() {
  Slot* oldest = &slots_[0];
  for (Slot& slot : slots_) {
    if (!slot.memory) return &slot;
    if (slot.step() < oldest->step()) oldest = &slot;
  }
  return oldest;
}

void SnapshotRing::Begin(RunMemory memory) {
  Complete();
  current_ = Oldest();
  current_->memory = std::move(memory);
  current_->id = ++last_id_;
  for (uint32_t i = 0; i < saved_.size(); ++i) current_->counts[i] = store_->count(i);
  saved_.assign(saved_.size(), false);
  next_ = 0;
  left_ = static_cast<uint32_t>(saved_.size());
}

void SnapshotRing::Save(uint32_t tensor, absl::AnyInvocable<void()> done) {
  saved_[tensor] = true;
  store_->Save(tensor, &current_->image, [done = std::move(done)](const TaskResult&) mutable {
    if (done) done();
  });
  if (--left_ == 0) current_ = nullptr;
}

void SnapshotRing::BeforeUpdate(uint32_t tensor) {
  if (current_ != nullptr && !saved_[tensor]) Save(tensor, nullptr);
}

void SnapshotRing::SaveNext(absl::AnyInvocable<void()> done) {
  if (current_ == nullptr || saving_) return;
  while (saved_[next_]) ++next_;
  saving_ = true;
  Save(next_, [this, done = std::move(done)]() mutable {
    saving_ = false;
    done();
  });
}

void SnapshotRing::Complete() {
  for (uint32_t i = 0; current_ != nullptr; ++i) BeforeUpdate(i);
}

std::vector<uint64_t> SnapshotRing::steps() const {
  std::vector<uint64_t> steps;
  for (const Slot& slot : slots_) {
    if (slot.memory) steps.push_back(slot.step());
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<uint64_t> SnapshotRing::NearestTo(uint64_t step) const {
  std::optional<uint64_t> nearest;
  for (const uint64_t kept : steps()) {
    if (kept <= step) nearest = kept;
  }
  return nearest;
}

uint64_t SnapshotRing::IdOf(uint64_t step) const {
  const auto found = std::find_if(slots_.begin(), slots_.end(),
                                  [step](const Slot& slot) { return slot.memory && slot.step() == step; });
  return found->id;
}

const SnapshotRing::Slot* SnapshotRing::Find(uint64_t id) const {
  const auto found =
      std::find_if(slots_.begin(), slots_.end(), [id](const Slot& slot) { return slot.memory && slot.id == id; });
  return found == slots_.end() ? nullptr : &*found;
}

const StoreImage* SnapshotRing::ImageOf(uint64_t id, uint32_t tensor) {
  const Slot* const slot = Find(id);
  if (slot == current_) BeforeUpdate(tensor);  // it is not there yet
  return &slot->image;
}

const RunMemory& SnapshotRing::Restore(uint64_t step) {
  Slot* wanted = nullptr;
  for (Slot& slot : slots_) {
    if (!slot.memory || slot.step() < step) continue;
    if (slot.step() == step) {
      wanted = &slot;
      continue;
    }
    if (current_ == &slot) current_ = nullptr;  // what was submitted of it is done before the slot is used again
    slot.memory.reset();
  }
  Complete();
  for (uint32_t i = 0; i < saved_.size(); ++i) store_->Restore(i, wanted->image, wanted->counts[i]);
  return *wanted->memory;
}

}  // namespace ballast
