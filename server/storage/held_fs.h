// The file system as a daemon changes it that has locked a folder: only while the folder at that path is the one it has
// locked. Somebody may move the folder away, or unmount it, under the daemon, and another daemon may have locked what lies
// there since.
//
//   HeldFs fs(SystemFs(), "/var/lib/ballast", "runs", std::move(lock));
//   RETURN_IF_ERROR(fs.MakeFolder("/var/lib/ballast/runs/r1"));
//
// What is being written to a file that is open goes on, wherever that is by then. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

#include "server/storage/fs.h"

namespace ballast {

class HeldFs final : public Fs {
 public:
  static constexpr absl::string_view kLockName = "ballast.lock";

  // `fs` outlives this. `content`: the folder in `dir` that all is in.
  HeldFs(Fs* fs, std::string dir, absl::string_view content, std::unique_ptr<FolderLock> lock);

  // FAILED_PRECONDITION: another folder is there, and says what to do; NOT_FOUND: none is, or no content. One that was
  // made anew, with nothing in its content, is locked and held from then on.
  absl::Status CheckHeld();

  // As Fs, once CheckHeld is OK.
  absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path) override;
  absl::Status MakeFolder(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveFolder(const std::string& path) override;
  // As Fs: they change nothing that is there.
  absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path) override { return fs_->Open(path); }
  absl::StatusOr<std::vector<Entry>> List(const std::string& path) override { return fs_->List(path); }
  absl::Status SyncFolder(const std::string& path) override { return fs_->SyncFolder(path); }
  absl::StatusOr<Space> SpaceOf(const std::string& path) override { return fs_->SpaceOf(path); }
  absl::StatusOr<std::unique_ptr<FolderLock>> Lock(const std::string& path) override { return fs_->Lock(path); }

 private:
  Fs* const fs_;
  const std::string dir_, content_;
  absl::Mutex mu_;
  std::unique_ptr<FolderLock> lock_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
