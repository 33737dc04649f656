// What a checkpoint's JSON files say of a run, and back (proto/ballast/v1/checkpoint.proto). What is read may be damaged
// or of another run: whatever the run relies on is checked here.
//
// Pure functions; thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "ballast/v1/checkpoint.pb.h"
#include "ballast/v1/run.pb.h"
#include "server/run/checkpointed_run.h"
#include "server/spec/run_spec.h"

namespace ballast {

v1::CheckpointedRun FromCheckpointed(const RunSpec& spec, const RunFigures& figures, const RunMemory& memory,
                                     const std::vector<ParameterStore::UpdateCount>& counts);
// DATA_LOSS names `file` and the field.
absl::StatusOr<CheckpointedRun> ToCheckpointed(const v1::CheckpointedRun& run, const RunSpec& spec,
                                               const std::string& file);
// spec.json as the canonical spec that it was made of; `sha256`: of that, as the manifest has it.
absl::StatusOr<v1::RunSpec> ReadSpecJson(absl::string_view json, const std::string& sha256, const std::string& file);

// The three together, as the run uses them.
const CheckpointCodec& JsonCheckpoints();

}  // namespace ballast
