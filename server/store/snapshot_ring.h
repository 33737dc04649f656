// A run's snapshots: its state after some of its last steps, in host memory, and the way back to one of them.
//
//   ring->Begin(memory);         // step 50 has closed: its snapshot begins, and nothing is copied yet
//   ring->BeforeUpdate(tensor);  // the tensor is copied before it changes
//   ring->SaveNext(done);        // or earlier, when the devices have nothing else to do
//   ring->Restore(50);           // what is submitted from now on finds the run as it was
//
// A snapshot is consistent without a pause: each tensor is copied on its own queue, behind its last update of the step
// that has closed and ahead of its first update of a later step. Until it is copied, the store itself holds what the
// snapshot needs, so a run can go back to a snapshot from Begin on. When all places are taken, a new snapshot takes
// that of the oldest, which is gone from Begin on.
//
// Strand-confined. Create reserves the images; a RunMemory's memory comes with the messages that it holds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

#include "server/spec/run_spec.h"
#include "server/stability/spike_detector.h"
#include "server/stability/tensor_clip.h"
#include "server/step/client_state.h"
#include "server/step/step_record.h"
#include "server/store/parameter_store.h"

namespace ballast {

// What a run knows at the end of a step beside weights, state and counts of updates. Anything that decides from earlier
// steps keeps here what it has learned, so that a rewind makes it forget the steps that are undone.
struct RunMemory {
  StepRecord result;
  std::string stopped;                                    // why no step begins any more; empty: it may
  std::vector<std::optional<ClientState>> client_states;  // by rank
  SpikeDetector detector{{}, {}};
  std::vector<TensorClip::Average> norms = {};  // by tensor, where each is clipped by its own
  std::vector<double> last_lr = {};             // by tensor
};

class SnapshotRing {
 public:
  // Room for as many snapshots as the spec says. RESOURCE_EXHAUSTED when a device refuses. Both outlive the ring.
  static absl::StatusOr<std::unique_ptr<SnapshotRing>> Create(const RunSpec* spec, ParameterStore* store);

  // Whether a snapshot is to be taken after this step.
  bool Due(uint64_t step) const { return spec_->snapshots > 0 && step % spec_->snapshot_every == 0; }
  // Whether Begin finds a place: not all are pinned.
  bool HasPlace() const;
  // Begins the snapshot of the step that has just closed, which is as late as the latest that is kept, and then takes
  // its place, or later. HasPlace.
  void Begin(RunMemory memory);
  // To be called when the tensor's next update is about to be submitted.
  void BeforeUpdate(uint32_t tensor);
  // Copies one more tensor of the snapshot under way, unless one is being copied or none is left. Calls `done` on the
  // strand.
  void SaveNext(absl::AnyInvocable<void()> done);
  // Submits the copies that the snapshot under way still lacks.
  void Complete();

  // The steps that Restore can go back to, ascending.
  std::vector<uint64_t> steps() const;
  // The number of the snapshot of one of these steps; each snapshot has a number of its own.
  uint64_t IdOf(uint64_t step) const;
  // Whether the snapshot is still kept. ImageOf and CountOf require that.
  bool Keeps(uint64_t id) const { return Find(id) != nullptr; }
  // The snapshot begun last; 0: none was.
  uint64_t last_id() const { return last_id_; }
  void Pin(uint64_t id);
  // Also of a snapshot that was dropped since.
  void Unpin(uint64_t id);
  // Calls `done` on the strand: true, the image has all of the snapshot; false, it was dropped before.
  void WhenSaved(uint64_t id, absl::AnyInvocable<void(bool saved)> done);
  // Of a snapshot that is pinned.
  StoreImage* PinnedImage(uint64_t id) { return &At(id)->image; }
  const RunMemory& PinnedMemory(uint64_t id) const { return *At(id)->memory; }
  const std::vector<ParameterStore::UpdateCount>& PinnedCounts(uint64_t id) const { return At(id)->counts; }
  // Time that devices have spent on its copies that updates may have waited for: not on those by SaveNext.
  double PinnedStallSeconds(uint64_t id) const { return At(id)->stall_seconds; }
  // A place for a snapshot that is to be brought, pinned: a free one; where there is none, that of the oldest snapshot,
  // which goes, if one may. None: there is no such place.
  enum class OldestSnapshot { kStays, kMayGo };
  std::optional<uint64_t> BeginBringing(OldestSnapshot oldest);
  // The image has it. It stays pinned, and is no snapshot before Accept; Unpin drops it.
  void Bring(uint64_t id, RunMemory memory, std::vector<ParameterStore::UpdateCount> counts);
  // What was brought is a snapshot, in the place of one of the same step, and the pin goes.
  void Accept(uint64_t id);

  // Where the tensor is, for tasks that are submitted before anything else is.
  const StoreImage* ImageOf(uint64_t id, uint32_t tensor);
  // The tensor's updates up to the snapshot.
  const ParameterStore::UpdateCount& CountOf(uint64_t id, uint32_t tensor) const { return Find(id)->counts[tensor]; }
  // The latest of steps() at or before `step`; none: all are later.
  std::optional<uint64_t> NearestTo(uint64_t step) const;
  // Goes back to one of steps(); later snapshots are dropped.
  const RunMemory& Restore(uint64_t step);

  uint64_t bytes() const;                          // of the live images
  uint64_t most() const { return slots_.size(); }  // that are kept

 private:
  struct Slot {
    StoreImage image;
    std::optional<RunMemory> memory;  // none: it is free
    std::vector<ParameterStore::UpdateCount> counts;
    uint64_t id = 0;
    bool pinned = false;
    bool dropped = false;  // while it is pinned: it is no snapshot any more, or not yet
    uint32_t unsaved = 0;  // tensors that are not in the image yet
    double stall_seconds = 0;
    absl::AnyInvocable<void(bool)> when_saved = nullptr;
    bool kept() const { return memory.has_value() && !dropped; }
    uint64_t step() const { return memory->result.step; }
  };

  SnapshotRing(const RunSpec* spec, ParameterStore* store) : spec_(spec), store_(store) {}
  // That may be used; nullptr: all are pinned.
  Slot* Oldest();
  const Slot* Find(uint64_t id) const;
  const Slot* At(uint64_t id) const;
  Slot* At(uint64_t id) { return const_cast<Slot*>(std::as_const(*this).At(id)); }
  void Drop(Slot* slot);
  void OnSaved(uint64_t id, double stall_seconds);
  // No `done`: an update may wait for it.
  void Save(uint32_t tensor, absl::AnyInvocable<void()> done);

  const RunSpec* const spec_;
  ParameterStore* const store_;
  std::vector<Slot> slots_;
  uint64_t last_id_ = 0;
  // The snapshot under way.
  Slot* current_ = nullptr;
  std::vector<bool> saved_;  // by tensor: submitted
  uint32_t next_ = 0;        // the first that may not be
  uint32_t left_ = 0;        // not submitted
  bool saving_ = false;      // by SaveNext
};

}  // namespace ballast
