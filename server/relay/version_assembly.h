// A version put together of the parts in which it comes from another daemon: all of it, for readers that have none, and
// what it changes of the one before, as it came. A chunk that does not change is in both versions, and there once.
//
//   VersionAssembly assembly(run, begin, newest);
//   for (...) RETURN_IF_ERROR(assembly.Take(chunk));  // those that IncomingVersion has taken
//   ASSIGN_OR_RETURN(VersionAssembly::Made made, assembly.End(end));
//
// Thread-compatible. Memory: of the run's FollowMemory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "ballast/v1/follow.pb.h"
#include "server/follow/version.h"
#include "server/relay/relayed_run.h"
#include "server/store/tensor_digester.h"

namespace ballast {

class VersionAssembly {
 public:
  // before: what it changes, or what has the tensors that do not come; nullptr: all come. last: the number of the run's
  // newest version; 0: there is none. The run outlives the assembly.
  VersionAssembly(const RelayedRun& run, const v1::VersionBegin& begin, std::shared_ptr<const WeightVersion> before,
                  uint64_t last);

  // INVALID_ARGUMENT: the changes are malformed; DATA_LOSS: the tensor has another digest than was said.
  absl::Status Take(const v1::ChangedChunk& chunk);
  struct Made {
    std::shared_ptr<const WeightVersion> version;
    std::shared_ptr<const VersionChange> change;  // nullptr: it is not known, or takes more than a version
  };
  // INTERNAL: the version came whole, but for a tensor that is not here.
  absl::StatusOr<Made> End(const v1::VersionEnd& end);

 private:
  VersionPiecePtr PieceOf(const v1::ChangedChunk& chunk, VersionPiecePtr before, absl::Status* status) const;
  void Keep(const v1::ChangedChunk& chunk, const VersionPiecePtr& now, bool whole);
  absl::Status CheckDigest(uint32_t tensor, uint64_t said);
  uint64_t ElementsThatCame() const;

  const RunSpec& spec_;
  const std::vector<uint64_t>& chunk_starts_;
  const uint64_t most_change_bytes_;  // kept of what it changes
  const std::shared_ptr<FollowMemory> memory_;
  const bool whole_;  // it changes no other version
  const std::shared_ptr<const WeightVersion> before_;
  const std::shared_ptr<WeightVersion> version_ = std::make_shared<WeightVersion>();
  std::shared_ptr<VersionChange> change_ = std::make_shared<VersionChange>();  // nullptr: it takes too much
  uint64_t change_memory_ = 0;
  std::vector<bool> came_;  // by tensor
};

}  // namespace ballast
