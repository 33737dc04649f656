// An upload of weights, and of state for those tensors that have some: each tensor's chunks in any order and any wire
// format, until all have come. Each chunk is in the store at once; the run counts as loaded only when Finish says so.
//
// Strand-confined. Weights live in the device task's completion, without a copy; state is encoded at once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

#include "server/step/step_machine.h"
#include "server/store/parameter_store.h"

namespace ballast {

// One upload: who makes it, and which of their uploads it is.
struct LoadCall {
  SessionId session = {};
  uint64_t number = 0;
  bool operator==(const LoadCall&) const = default;
};

// What a run lacks, by tensor: all of it must come with the next upload. A tensor's state is what its rule keeps, and
// the count of its updates.
struct LoadNeeds {
  std::vector<bool> weights, state;
};

struct LoadChunk {
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  kernels::PlaneKind kind = kernels::PlaneKind::kWeights;  // others where StateCodec has one
  kernels::WireIndex format = 0;
  std::string data;                                // of the chunk's exact size: the edge saw to it
  std::optional<uint64_t> updates = std::nullopt;  // this instead of data
};

class LoadJob : public std::enable_shared_from_this<LoadJob> {
 public:
  using Done = absl::AnyInvocable<void(absl::Status)>;
  // `needs` outlives the job, which adds each tensor and state that it begins.
  LoadJob(const RunSpec* spec, ParameterStore* store, LoadNeeds* needs);
  ~LoadJob();

  // Calls `done` on the strand: INVALID_ARGUMENT names a tensor with a value that its format cannot hold. To be called
  // again only after `done`.
  void Load(std::vector<LoadChunk> chunks, Done done);
  // Answers the chunks under way with this status, now.
  void Abandon(absl::Status why);
  // OK, or the first tensor that is needed and not complete, or whose state is.
  absl::Status Finish() const;

 private:
  absl::Status LoadOne(LoadChunk chunk);
  void LoadWeights(TensorRange range, LoadChunk chunk);
  absl::Status LoadState(TensorRange range, const LoadChunk& chunk);
  void OnLoaded(uint64_t load, uint32_t tensor, bool finite);
  void OnOneLess();
  absl::Status CheckState(uint32_t tensor) const;

  const RunSpec* const spec_;
  ParameterStore* const store_;
  LoadNeeds* const needs_;
  std::array<std::vector<std::vector<bool>>, 3> held_;  // by kind, tensor, chunk
  std::vector<bool> counted_;                           // by tensor: its updates were told
  Done done_;                                           // of the chunks under way
  uint64_t load_ = 0;                                   // theirs is this number
  size_t left_ = 0;                                     // of them
};

}  // namespace ballast
