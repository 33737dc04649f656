// Checks checkpoints where no daemon runs: every file of the folder, every byte, and whether the files fit together
// (proto/CHECKPOINTS.md, "What is checked").
//
// Thread-safe; reads a file at a time, in blocks of 4 MiB.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast {

// The folder of one checkpoint. `said`: what was found, for people, one line each; of damage, each file's. DATA_LOSS is
// the first of these, and names the file and the MiB; FAILED_PRECONDITION: a later version wrote it.
// `wanted`, where there is one, is asked before each block; once it says no: CANCELLED.
absl::Status VerifyCheckpoint(const std::string& folder, std::vector<std::string>* said,
                              const std::function<bool()>& wanted = nullptr);

// The folders of checkpoints in this one: itself, those of a run, or those of all runs of a daemon; also what only has a
// checkpoint's name, for it is damaged. Not those that were never published. NOT_FOUND and so on: it cannot be read.
absl::StatusOr<std::vector<std::string>> CheckpointFoldersIn(const std::string& dir);

}  // namespace ballast
