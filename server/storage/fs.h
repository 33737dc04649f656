// The file system as storage uses it: few calls, each of which may fail, and of which tests know what is still there
// after a power cut (tests/server/storage/model_fs.h).
//
//   ASSIGN_OR_RETURN(auto file, fs->Create("/data/a"));
//   RETURN_IF_ERROR(file->Write(0, bytes));
//   RETURN_IF_ERROR(file->Sync());                 // its bytes and its size are on the disk, its name is not
//   RETURN_IF_ERROR(fs->SyncFolder("/data"));      // and now that, too
//
// A status names the path, and says what the system said. NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED (also of a file
// system that is read-only), RESOURCE_EXHAUSTED (the disk, or a quota, is full) and UNAVAILABLE (the process or the
// system lacks descriptors or memory) are told apart; anything else that the disk says is DATA_LOSS. After a Sync or
// SyncFolder that has failed, what it was to keep may be lost, whatever a later one says: the caller gives it up.
//
// Symbolic links are not followed in the last part of a path. Thread-safe; a file is used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast {

// A file being written. The destructor closes it; what was not synced may be lost.
class OutputFile {
 public:
  // Where offsets, sizes and memory are multiples of this, bytes go to the disk past the page cache, if that is
  // possible.
  static constexpr uint64_t kDirect = 4096;

  virtual ~OutputFile() = default;
  virtual absl::Status Write(uint64_t offset, absl::Span<const std::byte> bytes) = 0;
  virtual absl::Status SetSize(uint64_t bytes) = 0;
  virtual absl::Status Sync() = 0;
};

// A file being read. Past the page cache, where an OutputFile is written so. Thread-safe.
class InputFile {
 public:
  virtual ~InputFile() = default;
  virtual uint64_t bytes() const = 0;  // when it was opened
  // All of `to`. DATA_LOSS where the file ends before.
  virtual absl::Status Read(uint64_t offset, absl::Span<std::byte> to) = 0;
};

class FolderLock {
 public:
  virtual ~FolderLock() = default;
  // Whether what lies at the lock's path is what is held. FAILED_PRECONDITION: it is something else, which somebody has
  // put there since; NOT_FOUND: nothing is there. The file may be removed: then it is the folder that counts. Thread-safe.
  virtual absl::Status CheckPlace() const = 0;
};

class Fs {
 public:
  enum class Kind { kFile, kFolder, kOther };
  struct Entry {
    std::string name;
    Kind kind = Kind::kOther;
  };
  struct Space {
    uint64_t free_bytes = 0;  // for this user
    uint64_t size_bytes = 0;
  };

  virtual ~Fs() = default;
  // A new file, for its owner alone. ALREADY_EXISTS.
  virtual absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path) = 0;
  // FAILED_PRECONDITION: it is no ordinary file.
  virtual absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path) = 0;
  // A new folder, for its owner alone. ALREADY_EXISTS.
  virtual absl::Status MakeFolder(const std::string& path) = 0;
  // By name. FAILED_PRECONDITION: it is no folder.
  virtual absl::StatusOr<std::vector<Entry>> List(const std::string& path) = 0;
  // Within one folder. `to` must not exist.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  virtual absl::Status RemoveFolder(const std::string& path) = 0;  // which is empty
  // The names in the folder are on the disk.
  virtual absl::Status SyncFolder(const std::string& path) = 0;
  virtual absl::StatusOr<Space> SpaceOf(const std::string& path) = 0;
  // Held by one process at a time, until the lock or the process is gone; made if it is not there. So is the folder that
  // it lies in, for the file may be removed meanwhile. UNAVAILABLE: another process, which is named if it is known, holds
  // one of them.
  virtual absl::StatusOr<std::unique_ptr<FolderLock>> Lock(const std::string& path) = 0;
};

// The system's own.
Fs* SystemFs();

}  // namespace ballast
