// What a checkpoint's manifest says of it as a whole.
//
// Thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "server/storage/checkpoint_reader.h"
#include "server/storage/checkpoint_writer.h"

namespace ballast {

// Of all files that it lists.
uint64_t BytesOf(const v1::CheckpointManifest& manifest);
// As if it had been written now: its place by its folder's name, its size, and its age by the clock of the machine, which
// may have been set back since.
CheckpointWritten WrittenOf(const CheckpointReader& checkpoint);
// Of the newest that counts in the folder; one of step 0: there is none. A manifest that cannot be read leaves size and
// age 0: the damage is told when the checkpoint is to be loaded.
absl::StatusOr<CheckpointWritten> NewestIn(Fs* fs, const RunFolder& folder);

}  // namespace ballast
