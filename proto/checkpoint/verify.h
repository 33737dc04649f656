// Checks checkpoints where no daemon runs: every file of the folder, every byte (proto/CHECKPOINTS.md, "What is checked").
//
// Thread-safe; reads a file at a time, in blocks of 4 MiB.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast {

// The folder of one checkpoint. `said`: what was found, for people, one line each; of damage, each file's. DATA_LOSS is
// the first of these, and names the file and the MiB; FAILED_PRECONDITION: a later version wrote it.
absl::Status VerifyCheckpoint(const std::string& folder, std::vector<std::string>* said);

// The folders of checkpoints in this one: itself, those of a run, or those of all runs of a daemon. Not those that were
// never published. NOT_FOUND and so on: it cannot be read.
absl::StatusOr<std::vector<std::string>> CheckpointFoldersIn(const std::string& dir);

}  // namespace ballast
