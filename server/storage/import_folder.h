// Checkpoints that an operator has brought back to this machine, from a bucket or another host, and that the daemon is
// asked to read (Restore with `from`). Whoever reaches the daemon's port may ask, so only folders beneath
// storage.import_dir are looked into, by no symbolic link and no "..", and nothing in them is changed.
//
//   ASSIGN_OR_RETURN(CheckpointReader checkpoint, ExamineImported(fs, "/srv/restore", "/srv/restore/r1", 0, wanted));
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"

#include "server/storage/checkpoint_reader.h"
#include "server/storage/fs.h"

namespace ballast {

// The checkpoint in `from`, which is its folder or a run's: of that step, or the newest where step is 0. All of it is read,
// and known to be right to the byte and in itself (proto/checkpoint/verify.h), when this returns. `wanted` is asked before
// each block of 4 MiB; once it says no: CANCELLED. PERMISSION_DENIED: `from` is no folder beneath import_dir, an absolute
// path, or import_dir is empty; FAILED_PRECONDITION: there is no such checkpoint, or a later version's; DATA_LOSS: it is
// damaged. `may`, if any, is asked before what takes long, with a checkpoint of which nothing is known to be right but its
// manifest's form: its error is returned.
absl::StatusOr<CheckpointReader> ExamineImported(
    Fs* fs, const std::string& import_dir, const std::string& from, uint64_t step, const std::function<bool()>& wanted,
    const std::function<absl::Status(const CheckpointReader&)>& may = nullptr);

}  // namespace ballast
