#include "server/store/snapshot_ring.h"

#include <algorithm>
#include <utility>

#include "server/base/status_macros.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<SnapshotRing>> SnapshotRing::Create(const RunSpec* spec, ParameterStore* store) {
  std::unique_ptr<SnapshotRing> ring(new SnapshotRing(spec, store));
  const size_t tensors = spec->tensors.size();
  for (uint32_t s = 0; s < SnapshotImages(*spec); ++s) {
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
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.pinned) continue;
    if (!slot.kept()) return &slot;
    if (oldest == nullptr || slot.step() < oldest->step()) oldest = &slot;
  }
  return oldest;
}

bool SnapshotRing::HasPlace() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.pinned; });
}

void SnapshotRing::Begin(RunMemory memory) {
  Complete();
  for (Slot& slot : slots_) {
    if (slot.kept() && slot.step() >= memory.result.step) Drop(&slot);
  }
  current_ = Oldest();
  current_->memory = std::move(memory);
  current_->dropped = false;
  current_->id = ++last_id_;
  current_->stall_seconds = 0;
  for (uint32_t i = 0; i < saved_.size(); ++i) current_->counts[i] = store_->count(i);
  saved_.assign(saved_.size(), false);
  next_ = 0;
  left_ = current_->unsaved = static_cast<uint32_t>(saved_.size());
}

// What was submitted of its copies is done before the place is used again: both are tasks of the same queues.
void SnapshotRing::Drop(Slot* slot) {
  if (current_ == slot) current_ = nullptr;
  slot->pinned ? void(slot->dropped = true) : slot->memory.reset();
  if (slot->unsaved > 0 && slot->when_saved) std::exchange(slot->when_saved, nullptr)(false);
}

void SnapshotRing::OnSaved(uint64_t id, double stall_seconds) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [id](const Slot& slot) { return slot.id == id; });
  if (found == slots_.end()) return;
  found->stall_seconds += stall_seconds;
  if (--found->unsaved > 0) return;
  if (found->when_saved) std::exchange(found->when_saved, nullptr)(true);
}

void SnapshotRing::Save(uint32_t tensor, absl::AnyInvocable<void()> done) {
  saved_[tensor] = true;
  store_->Save(tensor, &current_->image,
               [this, id = current_->id, done = std::move(done)](const TaskResult& copied) mutable {
                 OnSaved(id, done ? 0 : copied.seconds);
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
    if (slot.kept()) steps.push_back(slot.step());
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
                                  [step](const Slot& slot) { return slot.kept() && slot.step() == step; });
  return found->id;
}

const SnapshotRing::Slot* SnapshotRing::Find(uint64_t id) const {
  const auto found =
      std::find_if(slots_.begin(), slots_.end(), [id](const Slot& slot) { return slot.kept() && slot.id == id; });
  return found == slots_.end() ? nullptr : &*found;
}

const SnapshotRing::Slot* SnapshotRing::At(uint64_t id) const {
  return &*std::find_if(slots_.begin(), slots_.end(), [id](const Slot& slot) { return slot.id == id; });
}

void SnapshotRing::Pin(uint64_t id) { At(id)->pinned = true; }

void SnapshotRing::Unpin(uint64_t id) {
  Slot* const slot = At(id);
  slot->pinned = false;
  slot->when_saved = nullptr;
  if (std::exchange(slot->dropped, false)) slot->memory.reset();
}

void SnapshotRing::WhenSaved(uint64_t id, absl::AnyInvocable<void(bool)> done) {
  Slot* const slot = At(id);
  if (slot->dropped || slot->unsaved == 0) return done(!slot->dropped);
  slot->when_saved = std::move(done);
}

std::optional<uint64_t> SnapshotRing::BeginBringing(OldestSnapshot oldest) {
  Complete();
  Slot* const slot = Oldest();
  if (slot == nullptr || (slot->kept() && oldest == OldestSnapshot::kStays)) return std::nullopt;
  store_->Forget(&slot->image);
  slot->memory.reset();
  slot->pinned = true;
  slot->dropped = false;
  slot->unsaved = 0;
  slot->id = ++last_id_;
  return slot->id;
}

void SnapshotRing::Bring(uint64_t id, RunMemory memory, std::vector<ParameterStore::UpdateCount> counts) {
  Slot* const brought = At(id);
  brought->dropped = true;
  brought->memory = std::move(memory);
  brought->counts = std::move(counts);
}

void SnapshotRing::Accept(uint64_t id) {
  Slot* const brought = At(id);
  for (Slot& slot : slots_) {
    if (slot.kept() && slot.step() == brought->step()) Drop(&slot);
  }
  brought->pinned = brought->dropped = false;
}

const StoreImage* SnapshotRing::ImageOf(uint64_t id, uint32_t tensor) {
  const Slot* const slot = Find(id);
  if (slot == current_) BeforeUpdate(tensor);  // it is not there yet
  return &slot->image;
}

const RunMemory& SnapshotRing::Restore(uint64_t step) {
  Slot* wanted = nullptr;
  for (Slot& slot : slots_) {
    if (!slot.kept() || slot.step() < step) continue;
    if (slot.step() == step) {
      wanted = &slot;
    } else {
      Drop(&slot);
    }
  }
  Complete();
  for (uint32_t i = 0; i < saved_.size(); ++i) store_->Restore(i, wanted->image, wanted->counts[i]);
  return *wanted->memory;
}

}  // namespace ballast
