// An upload of weights: each tensor's chunks in any order, any wire format, until all are in. What came is in the
// master at once; the run counts as loaded only when Finish says so.
//
// Strand-confined. The payload lives in the device task's completion: no copy.
#pragma once

#include <cstdint>
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

class LoadJob {
 public:
  LoadJob(const RunSpec* spec, ParameterStore* store);

  // `done` on the strand: INVALID_ARGUMENT naming the tensor where it holds a NaN or an infinity.
  void Load(LoadChunk chunk, absl::AnyInvocable<void(absl::Status)> done);
  // OK, or the first tensor that is not complete.
  absl::Status Finish() const;

 private:
  const RunSpec* const spec_;
  ParameterStore* const store_;
  std::vector<std::vector<bool>> held_;  // by tensor, chunk
};

}  // namespace ballast
