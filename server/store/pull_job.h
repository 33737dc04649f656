// Weights and state for one reader, the latest or a snapshot's: tensor by tensor, slot by slot, chunk by chunk; each
// chunk, or the part of it that the reader wants, is encoded when the one before has been written. What is of small
// tensors is encoded, and written, together, where the reader's sink gathers it. A tensor that is
// updated meanwhile starts again at chunk 0 of its first slot with its new label, at most kMostRestarts times; then a
// copy of it is sent, so that a job ends however slow its reader is, and all slots of a tensor are of one update. When
// the snapshot is no longer kept, the job ends.
//
// Strand-confined. Shared by its run and the device tasks that fill its buffers. Memory: one chunk while it lasts, and
// the same chunk as it is stored while state is decoded; and kSmallSendBuffers of small tensors, likewise.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/step/coverage.h"
#include "server/store/parameter_store.h"
#include "server/store/snapshot_ring.h"
#include "server/store/state_slot.h"
#include "server/store/weight_copies.h"
#include "server/store/weight_sink.h"

namespace ballast {

// What is pulled. `snapshot`: SnapshotRing::IdOf; none: the latest weights.
struct PullSource {
  ParameterStore* store = nullptr;
  SnapshotRing* snapshots = nullptr;
  std::optional<uint64_t> snapshot = std::nullopt;
};

class PullJob : public std::enable_shared_from_this<PullJob> {
 public:
  static constexpr int kMostRestarts = 2;                     // of a tensor
  static constexpr double kLeastBytesPerS = 1024.0 * 1024.0;  // of a copy that another reader waits for

  // series: whose weights are sent, in kWeights and kMaster.
  PullJob(const RunSpec* spec, PullSource source, WeightCopies* copies, std::shared_ptr<WeightSink> sink,
          WeightSeries series = {});

  // Once. Slots that a tensor has none of are left out, and so are tensors of which `parts` has nothing.
  void Begin(std::vector<uint32_t> tensors, std::vector<StateSlot> slots = {StateSlot::kWeights}, ChunkSet parts = {});
  void OnWritten();
  // Tells the reader why, and sends nothing more.
  void Stop(absl::Status status);
  bool stopped() const { return stopped_; }
  WeightSink* sink() const { return sink_.get(); }
  // Since when (MonotonicSeconds) the reader has not taken the chunk that it was sent; none: it has taken it, or the
  // job is stopped.
  std::optional<double> waits_since_s() const { return waits_since_s_; }
  // Whether its reader has taken longer over its copy than patience_s and what the bytes need at kLeastBytesPerS.
  bool KeepsCopyTooLong(double now_s, double patience_s) const;

 private:
  // A chunk that is encoded, and its memory.
  struct Item {
    WeightPiece piece;
    StateRoom room;
    WeightsChunk chunk;
  };

  void EncodeNext();
  // Of the tensor in hand, the chunk to be sent next, or behind it; the slot kUpdates is one chunk.
  std::optional<uint64_t> NextChunk(uint64_t from) const;
  // To the next slot that its tensor has, unless it is at one.
  void FindSlot();
  bool Has(uint32_t tensor, StateSlot slot) const;
  // Whether the tensor has none of the slots after the one in hand.
  bool InLastSlot() const;
  bool begun() const { return chunk_ > 0 || sent_slots_ > 0; }  // the tensor in hand
  void LabelTensor(uint32_t tensor);
  // Whether the tensor in hand is still the version that it was begun with; if not, it starts again.
  bool Unchanged();
  void AskForCopy();
  void OnCopy(absl::StatusOr<const StoreImage*> copy);
  void GiveCopyBack();
  // What is to be sent next, and what goes with it.
  void EncodeGroup();
  // Whether the chunk in hand may go with those of the group, which take so many bytes at most.
  bool Joins(uint64_t bytes) const;
  absl::Status Encode(Item* item);
  void OnEncoded();
  // To what comes after the chunk in hand, which is described.
  WeightsChunk Advance();
  void Write();

  const RunSpec* const spec_;
  const PullSource source_;
  WeightCopies* const copies_;
  const std::shared_ptr<WeightSink> sink_;
  const WeightSeries series_;
  std::vector<uint32_t> tensors_;
  std::vector<StateSlot> slots_;
  ChunkSet parts_;         // what is sent of the tensors
  size_t next_ = 0;        // index into tensors_
  size_t slot_ = 0;        // index into slots_
  size_t sent_slots_ = 0;  // of the tensor in hand
  uint64_t chunk_ = 0;     // the first that is not sent yet
  uint64_t version_ = 0;
  ParameterStore::UpdateCount label_;  // of the tensor, when it was begun
  int restarts_ = 0;                   // of the tensor
  bool has_copy_ = false;
  const StoreImage* copy_ = nullptr;  // of the tensor, where it is sent from one
  double copy_waited_s_ = 0;          // for the reader to take what it was sent of it
  double copy_bytes_ = 0;             // that were taken of it
  std::vector<Item> items_;           // the first for any chunk, the others for small tensors; none once it is stopped
  size_t group_ = 0;                  // of them are encoded or written together
  size_t encoding_ = 0;               // of them are being encoded, or about to be
  std::optional<double> waits_since_s_;
  bool stopped_ = false;
  size_t group_bytes_ = 0;  // the sink takes them out
};

}  // namespace ballast
