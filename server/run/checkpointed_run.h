// What a checkpoint holds of a run beside its planes, and the codec that makes run.json and spec.json of it. A value.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "server/spec/run_spec.h"
#include "server/stability/spike_policy.h"
#include "server/store/parameter_store.h"
#include "server/store/snapshot_ring.h"

namespace ballast {

// What a run counts, and its policy, which a rewind does not take back.
struct RunFigures {
  uint64_t generation = 1;
  uint64_t applied = 0, skipped = 0, partial = 0, aborted = 0, rewinds = 0;
  SpikePolicy policy{SpikeSettings()};
  // At that time connected, or away for less than their lease; none: an earlier version did not say.
  std::optional<uint32_t> ranks_held = {};
  uint64_t journal = 0;  // identity that the journal's files go on from the checkpoint by; 0: they do not
};

struct CheckpointedRun {
  RunFigures figures;
  RunMemory memory;                                 // the result's step is the checkpoint's
  std::vector<ParameterStore::UpdateCount> counts;  // by tensor
};

// Given by the edge, which can read messages. Thread-safe.
struct CheckpointCodec {
  // run.json; client_state by its step and size alone.
  std::function<std::string(const RunSpec& spec, const RunFigures& figures, const RunMemory& memory,
                            const std::vector<ParameterStore::UpdateCount>& counts)>
      run_json;
  // The same back; each client_state is zeros, as many as it has bytes. DATA_LOSS: it is not of this spec. `file` is for
  // messages.
  std::function<absl::StatusOr<CheckpointedRun>(const RunSpec& spec, const std::string& json, const std::string& file)>
      read_run;
  // The same in the messages' binary form, for the journal.
  std::function<std::string(const RunSpec& spec, const RunFigures& figures, const RunMemory& memory,
                            const std::vector<ParameterStore::UpdateCount>& counts)>
      run_bytes;
  std::function<absl::StatusOr<CheckpointedRun>(const RunSpec& spec, const std::string& bytes, const std::string& file)>
      read_run_bytes;
  // spec.json, of a canonical spec.
  std::function<std::string(const std::string& canonical)> spec_json;
};

}  // namespace ballast
