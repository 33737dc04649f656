#include "server/storage/held_fs.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"

namespace ballast {

HeldFs::HeldFs(Fs* fs, std::string dir, absl::string_view content, std::unique_ptr<FolderLock> lock)
    : fs_(fs), dir_(std::move(dir)), content_(absl::StrCat(dir_, "/", content)), lock_(std::move(lock)) {}

absl::Status HeldFs::CheckHeld() {
  absl::MutexLock lock(&mu_);
  const absl::Status held = lock_->CheckPlace();
  if (!absl::IsFailedPrecondition(held)) return held;
  ASSIGN_OR_RETURN(const std::vector<Entry> entries, fs_->List(content_));
  absl::Status why;
  if (entries.empty()) {
    auto anew = fs_->Lock(absl::StrCat(dir_, "/", kLockName));
    why = anew.status();
    if (anew.ok()) {
      lock_ = *std::move(anew);
      Log(LogLevel::kWarn, "storage", "the folder was made anew under the daemon, which goes on in it",
          {{"path", dir_}});
      return absl::OkStatus();
    }
  }
  return absl::FailedPreconditionError(absl::StrCat(
      dir_, " is another folder than the one that this daemon has locked, which was moved away or unmounted",
      why.ok() ? "" : absl::StrCat(" (", why.message(), ")"),
      ": nothing is written there. Bring the daemon's own folder back to that path; or, to have the runs that are "
      "there now, start the daemon anew"));
}

absl::StatusOr<std::unique_ptr<OutputFile>> HeldFs::Create(const std::string& path) {
  RETURN_IF_ERROR(CheckHeld());
  return fs_->Create(path);
}

absl::Status HeldFs::MakeFolder(const std::string& path) {
  RETURN_IF_ERROR(CheckHeld());
  return fs_->MakeFolder(path);
}

absl::Status HeldFs::Rename(const std::string& from, const std::string& to) {
  RETURN_IF_ERROR(CheckHeld());
  return fs_->Rename(from, to);
}

absl::Status HeldFs::RemoveFile(const std::string& path) {
  RETURN_IF_ERROR(CheckHeld());
  return fs_->RemoveFile(path);
}

absl::Status HeldFs::RemoveFolder(const std::string& path) {
  RETURN_IF_ERROR(CheckHeld());
  return fs_->RemoveFolder(path);
}

}  // namespace ballast
