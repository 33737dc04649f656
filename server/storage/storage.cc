#include "server/storage/storage.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/storage/tag_files.h"

namespace ballast {
namespace {

constexpr absl::string_view kRunsName = "runs";

absl::Status MakeIfMissing(Fs* fs, const std::string& path, const std::string& parent) {
  const absl::Status made = fs->MakeFolder(path);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  return fs->SyncFolder(parent);
}

void LogLeft(const std::string& where, const absl::Status& why) {
  if (why.ok()) return;
  Log(LogLevel::kWarn, "storage", "what was not published, or was being removed, is left",
      {{"path", where}, {"err", std::string(why.message())}});
}

}  // namespace

absl::Status AdviseOnFolder(const absl::Status& status) {
  const char* advice = absl::IsNotFound(status)             ? "; make it, as the daemon's own"
                       : absl::IsPermissionDenied(status)   ? "; it must be one that the daemon's user can write to"
                       : absl::IsFailedPrecondition(status) ? "; it must be a folder, and no link to one"
                       : absl::IsResourceExhausted(status)  ? "; make room there"
                                                            : "";
  return absl::Status(status.code(), absl::StrCat(status.message(), advice));
}

Storage::Storage(const Options& options, std::unique_ptr<FolderLock> lock)
    : options_(options),
      runs_(absl::StrCat(options.dir, "/", kRunsName)),
      fs_(options.fs, options.dir, kRunsName, std::move(lock)),
      command_(options.on_published),
      rate_(options.bytes_per_s),
      threads_(options.threads) {}

absl::StatusOr<std::unique_ptr<Storage>> Storage::Open(const Options& options) {
  // Whether the folder is there and is one, before anything is made in it.
  RETURN_IF_ERROR(AdviseOnFolder(options.fs->List(options.dir).status()));
  auto lock = options.fs->Lock(absl::StrCat(options.dir, "/", HeldFs::kLockName));
  RETURN_IF_ERROR(AdviseOnFolder(lock.status()));
  const std::string runs = absl::StrCat(options.dir, "/", kRunsName);
  RETURN_IF_ERROR(AdviseOnFolder(MakeIfMissing(options.fs, runs, options.dir)));
  RETURN_IF_ERROR(AdviseOnFolder(options.fs->List(runs).status()));
  std::unique_ptr<Storage> storage(new Storage(options, *std::move(lock)));
  storage->CleanUp();
  return storage;
}

void Storage::CleanUp() {
  LogLeft(runs_, RunFolder::CleanUpRemoved(&fs_, runs_));
  const auto run_ids = RunIds();
  LogLeft(runs_, run_ids.status());
  if (!run_ids.ok()) return;
  LogLinks();
  for (const std::string& run_id : *run_ids) {
    const auto folder = FolderOf(run_id);
    LogLeft(run_id, folder.ok() ? (*folder)->CleanUp() : folder.status());
    LogLeft(run_id, CleanUpTags(&fs_, absl::StrCat(runs_, "/", run_id, "/", kTagsFolder)));
  }
}

void Storage::LogLinks() const {
  const auto entries = fs_.List(runs_);
  if (!entries.ok()) return;  // as RunIds has said
  for (const Fs::Entry& entry : *entries) {
    if (entry.kind == Fs::Kind::kFolder) continue;
    Log(LogLevel::kWarn, "storage", "what is no folder is no run, and is passed over: no link is followed",
        {{"path", absl::StrCat(runs_, "/", entry.name)}});
  }
}

absl::StatusOr<std::vector<std::string>> Storage::RunIds() const {
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> entries, fs_.List(runs_));
  std::vector<std::string> ids;
  for (const Fs::Entry& entry : entries) {
    if (entry.kind == Fs::Kind::kFolder && entry.name[0] != '.') ids.push_back(entry.name);
  }
  return ids;
}

absl::StatusOr<bool> Storage::Has(const std::string& run_id) const {
  ASSIGN_OR_RETURN(const std::vector<std::string> ids, RunIds());
  return std::find(ids.begin(), ids.end(), run_id) != ids.end();
}

absl::StatusOr<std::shared_ptr<RunFolder>> Storage::FolderOf(const std::string& run_id) {
  absl::MutexLock lock(&mu_);
  std::shared_ptr<RunFolder>& folder = folders_[run_id];
  if (folder != nullptr) return folder;
  auto opened = RunFolder::Open(&fs_, runs_, run_id, &command_);
  if (!opened.ok()) {
    folders_.erase(run_id);
    return opened.status();
  }
  folder = std::make_shared<RunFolder>(*std::move(opened));
  return folder;
}

absl::Status Storage::Remove(const std::string& run_id) {
  ASSIGN_OR_RETURN(const bool there, Has(run_id));
  if (!there) return absl::NotFoundError(absl::StrCat("no run '", run_id, "' in ", runs_));
  ASSIGN_OR_RETURN(const std::shared_ptr<RunFolder> folder, FolderOf(run_id));
  {
    absl::MutexLock lock(&mu_);
    folders_.erase(run_id);
  }
  return folder->RemoveAll();
}

}  // namespace ballast
