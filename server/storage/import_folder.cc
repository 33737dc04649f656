#include "server/storage/import_folder.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/checkpoint/manifest.h"
#include "proto/checkpoint/verify.h"

#include "server/base/status_macros.h"
#include "server/base/utf8.h"
#include "server/storage/run_folder.h"

namespace ballast {
namespace {

constexpr size_t kMostPath = 4096;

absl::Status NotBeneath(const std::string& import_dir, const std::string& from, const std::string& why) {
  return absl::PermissionDeniedError(absl::StrCat("'", ValidUtf8(from, 200), "' ", why, "; bring the checkpoint to ",
                                                  import_dir, " (storage.import_dir), and name its folder there"));
}

// Every folder from import_dir down to it is there, and none is a link.
absl::Status CheckBeneath(Fs* fs, const std::string& import_dir, const std::string& from) {
  if (import_dir.empty()) {
    return absl::PermissionDeniedError(
        "this daemon reads no checkpoint from elsewhere: start it with storage.import_dir, a folder for those that are "
        "brought back to its machine");
  }
  if (from.size() > kMostPath) return NotBeneath(import_dir, from, "is longer than a path can be");
  if (from.find('\0') != std::string::npos) return NotBeneath(import_dir, from, "is no path");
  if (from != import_dir && !absl::StartsWith(from, absl::StrCat(import_dir, "/"))) {
    return NotBeneath(import_dir, from, "is not beneath the folder that this daemon may read from");
  }
  std::string path = import_dir;
  for (const absl::string_view part : absl::StrSplit(from.substr(import_dir.size()), '/', absl::SkipEmpty())) {
    if (part == "." || part == "..") return NotBeneath(import_dir, from, absl::StrCat("has '", part, "' in it"));
    absl::StrAppend(&path, "/", part);
    RETURN_IF_ERROR(fs->List(path).status());  // which follows no link
  }
  return absl::OkStatus();
}

// Whether it is a checkpoint's folder by what is in it.
bool IsCheckpoint(const std::vector<Fs::Entry>& entries) {
  return std::any_of(entries.begin(), entries.end(),
                     [](const Fs::Entry& entry) { return entry.name == kManifestName || entry.name == kSumsName; });
}

// The folder of the checkpoint in the folder of a run.
absl::StatusOr<std::string> ChooseIn(const std::string& from, const std::vector<Fs::Entry>& entries, uint64_t step) {
  const Fs::Entry* chosen = nullptr;
  uint64_t newest = 0;
  std::vector<uint64_t> steps;
  for (const Fs::Entry& entry : entries) {
    const auto named = ParseCheckpointName(entry.name);
    if (!named || named->state != CheckpointState::kKept) continue;
    steps.push_back(named->place.step);
    if ((step != 0 && named->place.step != step) || named->place.number < newest) continue;
    newest = named->place.number;
    chosen = &entry;
  }
  if (chosen == nullptr) {
    const std::string there =
        steps.empty() ? "no checkpoint" : absl::StrCat("those of steps ", absl::StrJoin(steps, ", "));
    return absl::FailedPreconditionError(
        absl::StrCat(from, step == 0 ? " is neither a checkpoint's folder nor a run's" : " has no checkpoint of step ",
                     step == 0 ? "" : absl::StrCat(step), "; in it there are ", there));
  }
  const std::string folder = absl::StrCat(from, "/", chosen->name);
  if (chosen->kind == Fs::Kind::kFolder) return folder;
  return absl::PermissionDeniedError(
      absl::StrCat(folder, " is a symbolic link, or no folder: copy the checkpoint itself to ", from));
}

}  // namespace

absl::StatusOr<CheckpointReader> ExamineImported(Fs* fs, const std::string& import_dir, const std::string& from,
                                                 uint64_t step, const std::function<bool()>& wanted,
                                                 const std::function<absl::Status(const CheckpointReader&)>& may) {
  RETURN_IF_ERROR(CheckBeneath(fs, import_dir, from));
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> entries, fs->List(from));
  std::string folder = from;
  if (!IsCheckpoint(entries)) {
    ASSIGN_OR_RETURN(folder, ChooseIn(from, entries, step));
  }
  if (may != nullptr) {
    ASSIGN_OR_RETURN(const CheckpointReader unverified, CheckpointReader::Open(fs, folder));
    RETURN_IF_ERROR(may(unverified));
  }
  std::vector<std::string> said;
  RETURN_IF_ERROR(VerifyCheckpoint(folder, &said, wanted));
  ASSIGN_OR_RETURN(CheckpointReader checkpoint, CheckpointReader::Open(fs, folder));
  if (step == 0 || checkpoint.manifest().step() == step) return checkpoint;
  return absl::FailedPreconditionError(
      absl::StrCat(folder, " is of step ", checkpoint.manifest().step(), ", not of step ", step));
}

}  // namespace ballast
