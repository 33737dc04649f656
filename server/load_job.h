// An upload of weights: each tensor's chunks in any order, any wire format, until all are in. What came is in the
// master at once; the run counts as loaded only when Finish says so.
//
// Strand-confined. The payload lives in the device task's completion: no copy.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

#include "server/parameter_store.h"
#include "server/step_machine.h"

namespace ballast {

// One upload: by whom, and which of theirs.
struct LoadCall {
  SessionId session = {};
  uint64_t number = 0;
  bool operator==(const LoadCall&) const = default;
};

struct LoadChunk {
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  kernels::WireIndex format = 0;
  std::string data;  // of the chunk's exact size: the edge saw to it
};

class LoadJob : public std::enable_shared_from_this<LoadJob> {
 public:
  using Done = absl::AnyInvocable<void(absl::Status)>;
  LoadJob(const RunSpec* spec, ParameterStore* store);
  ~LoadJob();

  // `done` on the strand: INVALID_ARGUMENT naming the tensor where it holds a NaN or an infinity. One chunk at a time:
  // not before the last one's `done`.
  void Load(LoadChunk chunk, Done done);
  // The chunk under way is answered with this, now.
  void Abandon(absl::Status why);
  // OK, or the first tensor that is not complete.
  absl::Status Finish() const;

 private:
  void OnLoaded(uint32_t tensor, bool finite);

  const RunSpec* const spec_;
  ParameterStore* const store_;
  std::vector<std::vector<bool>> held_;  // by tensor, chunk
  Done done_;                            // of the chunk under way
};

}  // namespace ballast
