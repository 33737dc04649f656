// Whether the files of a checkpoint fit together: that spec.json is the spec of the manifest's hash and run, that the
// headers of its files, and their sizes, are those that the spec leads to, and that run.json is of the same step and of
// so many tensors and ranks. It is what a daemon would refuse while it reads them, as far as that can be told without
// the registry of rules and formats: which planes a format has is taken from the first tensor of each group.
//
// Pure reading; thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "ballast/v1/checkpoint.pb.h"

namespace ballast {

// A number of bytes, and a hash, that every file is known to have. DATA_LOSS names the file and what is wrong with it.
absl::Status CheckMeaning(const std::string& folder, const v1::CheckpointManifest& manifest);

}  // namespace ballast
