// The folder in which a daemon keeps its runs (proto/CHECKPOINTS.md), the threads that read and write there, and the
// one lock that makes it this daemon's alone, also where somebody puts another folder in its place.
//
//   ASSIGN_OR_RETURN(auto storage, Storage::Open({.fs = SystemFs(), .dir = "/var/lib/ballast"}));
//   ASSIGN_OR_RETURN(auto folder, storage->FolderOf("r1"));
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "server/storage/disk_threads.h"
#include "server/storage/file_writer.h"
#include "server/storage/fs.h"
#include "server/storage/held_fs.h"
#include "server/storage/published_command.h"
#include "server/storage/run_folder.h"

namespace ballast {

// The same, with what is to be done about a folder that cannot be used.
absl::Status AdviseOnFolder(const absl::Status& status);

class Storage {
 public:
  struct Options {
    Fs* fs = nullptr;  // which outlives the storage
    std::string dir;   // is there
    int threads = 4;
    uint64_t bytes_per_s = 0;  // that checkpoints are written with; 0: as fast as the disk is
    PublishedCommand::Options on_published = {};
    std::string import_dir = {};  // beneath which ExamineImported may read; empty: nowhere
  };

  // UNAVAILABLE: another daemon has the folder. NOT_FOUND, PERMISSION_DENIED and so on name what is wrong with it.
  // Removes what earlier daemons had begun and not published; what cannot be removed is logged.
  static absl::StatusOr<std::unique_ptr<Storage>> Open(const Options& options);

  // Of the runs that are there, by id.
  absl::StatusOr<std::vector<std::string>> RunIds() const;
  absl::StatusOr<bool> Has(const std::string& run_id) const;
  // Made if it is not there. The same one each time.
  absl::StatusOr<std::shared_ptr<RunFolder>> FolderOf(const std::string& run_id);
  // The run is no more, and nobody writes for it. NOT_FOUND: it is not there.
  absl::Status Remove(const std::string& run_id);
  absl::StatusOr<Fs::Space> Space() const { return fs_.SpaceOf(options_.dir); }

  // As HeldFs: what another daemon may have is not written to.
  Fs* fs() { return &fs_; }
  DiskThreads* threads() { return &threads_; }
  RateLimit* rate() { return &rate_; }
  const std::string& import_dir() const { return options_.import_dir; }
  PublishedCommand* command() { return &command_; }

 private:
  Storage(const Options& options, std::unique_ptr<FolderLock> lock);
  void CleanUp();
  void LogLinks() const;

  const Options options_;
  const std::string runs_;
  mutable HeldFs fs_;
  PublishedCommand command_;
  absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<RunFolder>> folders_ ABSL_GUARDED_BY(mu_);
  RateLimit rate_;
  DiskThreads threads_;
};

}  // namespace ballast
