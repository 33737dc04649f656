// Makes versions of a run's weights beside its steps.
//
//   maker->Begin({generation, 50}, now, newest);  // step 50 has closed; nothing is encoded yet
//   maker->BeforeChange(tensor);                  // the tensor is encoded before it changes
//   maker->EncodeNext(done);                      // or earlier, when the devices have nothing else to do
//
// A version is consistent without a pause, as a snapshot is (store/snapshot_ring.h): each tensor is encoded on its own queue,
// behind its last update of the step that has closed and ahead of its next change. What is encoded is compared with the
// version before on a thread of the maker's own, so that the same comparison serves all formats and devices, and finds
// what rewinds, restores and loads have changed, too. A tensor that nothing was submitted for since is not encoded again.
//
// Strand-confined; held by a shared_ptr, since what is under way may answer when it is gone. Memory: of FollowMemory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "server/base/strand.h"
#include "server/follow/version.h"
#include "server/step/coverage.h"
#include "server/store/parameter_store.h"
#include "server/store/tensor_digester.h"

namespace ballast {

class VersionMaker : public std::enable_shared_from_this<VersionMaker> {
 public:
  // `change`: nullptr, there was no version before.
  using Made =
      std::function<void(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change)>;
  struct Environment {
    const RunSpec* spec;  // outlives the maker, like the next two
    ParameterStore* store;
    Strand* strand;
    ChunkSet::Starts chunk_starts;
    std::shared_ptr<FollowMemory> memory;
    WeightSeries series = {};
    Made made;  // on the strand
  };
  explicit VersionMaker(Environment environment);
  ~VersionMaker() { Abandon(); }

  bool making() const { return build_ != nullptr; }
  // Not while another is being made. `before`: the newest; nullptr: none.
  void Begin(VersionId id, double closed_unix_s, std::shared_ptr<const WeightVersion> before);
  // To be called when something that changes the tensor is about to be submitted.
  void BeforeChange(uint32_t tensor);
  // Encodes some more of the version under way, unless some is being encoded so or none is left: false. Calls `done` on
  // the strand.
  bool EncodeNext(std::function<void()> done);
  // The version under way comes to nothing.
  void Abandon();

 private:
  // A chunk on its way into the version.
  struct Item {
    uint32_t tensor = 0;
    uint64_t chunk = 0;
    std::unique_ptr<std::byte[]> memory;  // which the device writes first, on its own threads
    WeightPiece encoded = {};             // into that memory
    VersionPiecePtr before = {}, now = {};
    uint64_t digest = 0;     // of the tensor, with its last chunk
    uint64_t differing = 0;  // elements
    std::optional<ChangedPiece> changed = {};
  };
  struct Build;

  void Submit(uint32_t tensor, const std::function<void()>& done);
  void TakeOver(uint32_t tensor, const std::function<void()>& done);
  void OnEncoded(const std::shared_ptr<Build>& build, std::unique_ptr<Item> item);
  void CompareMore(const std::shared_ptr<Build>& build);
  static void Compare(const RunSpec& spec, const std::shared_ptr<FollowMemory>& memory, Build* build, Item* item);
  void OnCompared(const std::shared_ptr<Build>& build, std::vector<std::unique_ptr<Item>> items);
  void FinishIfWhole(const std::shared_ptr<Build>& build);

  const Environment environment_;
  const std::vector<uint64_t>& chunk_starts_;  // the environment's
  std::shared_ptr<Build> build_;               // the version under way
  bool encoding_ = false;                      // by EncodeNext
  uint64_t made_ = 0;
  Strand comparer_;  // last: its thread ends first
};

}  // namespace ballast
