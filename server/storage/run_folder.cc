#include "server/storage/run_folder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "proto/checkpoint/manifest.h"

#include "server/base/failpoint.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/storage/journal_files.h"
#include "server/storage/tag_files.h"

namespace ballast {
namespace {

// No run's name begins with a dot.
constexpr absl::string_view kRemovedPrefix = ".removed-";

struct StateName {
  CheckpointState state;
  absl::string_view prefix;
};
constexpr StateName kStateNames[] = {{CheckpointState::kSetAside, "discarded-"},
                                     {CheckpointState::kWriting, "writing-"},
                                     {CheckpointState::kDeleting, "deleting-"},
                                     {CheckpointState::kKept, ""}};

std::string NameIn(CheckpointState state, const CheckpointPlace& place) {
  for (const StateName& named : kStateNames) {
    if (named.state == state) return absl::StrCat(named.prefix, NameOf(place));
  }
  return NameOf(place);
}

// "model-00001-of-00002.safetensors"
bool IsShardName(absl::string_view name) {
  const auto five_digits = [&name] {
    uint32_t number = 0;
    const bool found = name.size() >= 5 && absl::SimpleAtoi(name.substr(0, 5), &number);
    if (found) name.remove_prefix(5);
    return found;
  };
  if (!absl::ConsumePrefix(&name, "model-") && !absl::ConsumePrefix(&name, "optimizer-")) return false;
  return five_digits() && absl::ConsumePrefix(&name, "-of-") && five_digits() && name == ".safetensors";
}

bool IsCheckpointFile(absl::string_view name) {
  for (const absl::string_view known : {kManifestName, kSumsName, kSpecName, kRunName, kClientStateName, kIndexName}) {
    if (name == known) return true;
  }
  return IsShardName(name);
}

// The number of the newest that counts of the step, else of the oldest that counts; 0: none does.
uint64_t SparedOf(const std::vector<CheckpointEntry>& entries, uint64_t replaced, uint64_t step) {
  uint64_t oldest = 0, spared = 0;
  for (const CheckpointEntry& entry : entries) {
    if (entry.state != CheckpointState::kKept || entry.place.number == replaced) continue;
    if (oldest == 0) oldest = entry.place.number;
    if (entry.place.step == step) spared = entry.place.number;
  }
  return spared > 0 ? spared : oldest;
}

}  // namespace

std::string NameOf(const CheckpointPlace& place) { return absl::StrFormat("%012d-step-%d", place.number, place.step); }

std::optional<CheckpointEntry> ParseCheckpointName(absl::string_view name) {
  CheckpointEntry entry{.name = std::string(name)};
  for (const StateName& named : kStateNames) {
    if (!absl::ConsumePrefix(&name, named.prefix)) continue;
    entry.state = named.state;
    break;
  }
  const size_t middle = name.find("-step-");
  if (middle == absl::string_view::npos || !absl::SimpleAtoi(name.substr(0, middle), &entry.place.number) ||
      !absl::SimpleAtoi(name.substr(middle + 6), &entry.place.step) || NameIn(entry.state, entry.place) != entry.name) {
    return std::nullopt;
  }
  return entry;
}

absl::StatusOr<RunFolder> RunFolder::Open(Fs* fs, const std::string& runs, const std::string& run_id,
                                          PublishedCommand* command) {
  RunFolder folder(fs, absl::StrCat(runs, "/", run_id), runs, command);
  const absl::Status made = fs->MakeFolder(folder.path_);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  RETURN_IF_ERROR(fs->SyncFolder(runs));  // also if it was there: who made it may have died before this
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> found, fs->List(folder.path_));
  for (const Fs::Entry& one : found) {
    const auto entry = ParseCheckpointName(one.name);
    if (one.kind == Fs::Kind::kFolder || !entry || entry->state != CheckpointState::kKept) continue;
    return absl::FailedPreconditionError(absl::StrCat(folder.path_, "/", one.name,
                                                      " has a checkpoint's name and is no folder, and no link is "
                                                      "followed: put the checkpoint itself there, or move the "
                                                      "link away to go on from an older one"));
  }
  return folder;
}

std::string RunFolder::PathOf(const CheckpointEntry& entry) const { return absl::StrCat(path_, "/", entry.name); }

absl::StatusOr<std::vector<CheckpointEntry>> RunFolder::List() const {
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> found, fs_->List(path_));
  std::vector<CheckpointEntry> entries;
  for (const Fs::Entry& one : found) {
    if (one.kind != Fs::Kind::kFolder) continue;
    if (auto entry = ParseCheckpointName(one.name)) entries.push_back(*std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return std::pair(a.place.number, a.name) < std::pair(b.place.number, b.name);
  });
  return entries;
}

absl::StatusOr<uint64_t> RunFolder::NextNumber() const {
  const auto listed = List();
  if (absl::IsNotFound(listed.status())) return 1;  // somebody has removed it, and Begin makes it anew
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, listed);
  if (entries.empty()) return 1;
  if (entries.back().place.number == std::numeric_limits<uint64_t>::max()) {
    return absl::FailedPreconditionError(
        absl::StrCat(PathOf(entries.back()),
                     " has the largest number that there is, and none can come after it: give "
                     "it the number after that of the checkpoint before it"));
  }
  return entries.back().place.number + 1;
}

absl::StatusOr<std::string> RunFolder::Begin(const CheckpointPlace& place) {
  const std::string path = absl::StrCat(path_, "/", NameIn(CheckpointState::kWriting, place));
  absl::Status made = fs_->MakeFolder(path);
  if (absl::IsNotFound(made)) {
    RETURN_IF_ERROR(MakeAnew());
    made = fs_->MakeFolder(path);
  }
  RETURN_IF_ERROR(made);
  return path;
}

absl::Status RunFolder::MakeAnew() {
  const absl::Status made = fs_->MakeFolder(path_);
  // What is below it now may be another disk's.
  if (absl::IsNotFound(made)) {
    return absl::FailedPreconditionError(absl::StrCat(
        runs_,
        " is gone under the daemon: was the volume of storage.dir unmounted, or what is in it removed? "
        "Bring it back as it was; or make that folder, as the daemon's own, to go on without what was there"));
  }
  RETURN_IF_ERROR(made);
  Log(LogLevel::kWarn, "storage", "the folder of a run was removed under it, and was made anew", {{"path", path_}});
  return fs_->SyncFolder(runs_);
}

absl::Status RunFolder::RenameSynced(const std::string& from, const std::string& to) {
  RETURN_IF_ERROR(fs_->Rename(absl::StrCat(path_, "/", from), absl::StrCat(path_, "/", to)));
  Failpoint("folder.renamed");
  return fs_->SyncFolder(path_);
}

absl::Status RunFolder::Publish(const CheckpointPlace& place) {
  const std::string writing = NameIn(CheckpointState::kWriting, place);
  RETURN_IF_ERROR(fs_->SyncFolder(absl::StrCat(path_, "/", writing)));
  RETURN_IF_ERROR(RenameSynced(writing, NameOf(place)));
  if (command_ != nullptr) {
    command_->OnPublished({.run_id = path_.substr(runs_.size() + 1),
                           .folder = absl::StrCat(path_, "/", NameOf(place)),
                           .number = place.number,
                           .step = place.step});
  }
  return absl::OkStatus();
}

void RunFolder::OfferAgain(const CheckpointPlace& place) const {
  if (command_ != nullptr) command_->OfferAgain(absl::StrCat(path_, "/", NameOf(place)));
}

absl::StatusOr<uint64_t> RunFolder::NewestIfAllAfter(uint64_t step) const {
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, List());
  uint64_t newest = 0;
  for (const CheckpointEntry& entry : entries) {
    if (entry.state != CheckpointState::kKept) continue;
    if (entry.place.step <= step) return 0;
    newest = entry.place.number;
  }
  return newest;
}

absl::Status RunFolder::SetAside(uint64_t after_step, uint64_t last_number) {
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, List());
  // The newest first: what is left at any moment is an older state of the run, never one with a gap.
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (entry->state != CheckpointState::kKept || entry->place.step <= after_step) continue;
    if (entry->place.number <= last_number) RETURN_IF_ERROR(SetAside(*entry));
  }
  return absl::OkStatus();
}

absl::Status RunFolder::SetAside(const CheckpointEntry& entry) {
  if (command_ != nullptr) command_->Withdraw(PathOf(entry));
  return RenameSynced(entry.name, NameIn(CheckpointState::kSetAside, entry.place));
}

absl::Status RunFolder::PassOver(uint64_t number) {
  ASSIGN_OR_RETURN(const uint64_t next, NextNumber());
  read_ = number;
  passed_over_ = next - 1;
  return absl::OkStatus();
}

absl::Status RunFolder::RemoveFiles(const std::string& folder) {
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> files, fs_->List(folder));
  for (const Fs::Entry& file : files) {
    if (file.kind == Fs::Kind::kFile && IsCheckpointFile(file.name)) {
      RETURN_IF_ERROR(fs_->RemoveFile(absl::StrCat(folder, "/", file.name)));
      Failpoint("folder.file_removed");
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        folder, " is left: ", file.name, " in it is no file of a checkpoint; move it away, and remove the folder"));
  }
  return fs_->RemoveFolder(folder);
}

absl::Status RunFolder::Remove(const CheckpointEntry& entry) {
  std::string name = entry.name;
  if (entry.state == CheckpointState::kKept || entry.state == CheckpointState::kSetAside) {
    name = NameIn(CheckpointState::kDeleting, entry.place);
    RETURN_IF_ERROR(RenameSynced(entry.name, name));
  }
  return RemoveFiles(absl::StrCat(path_, "/", name));
}

absl::Status RunFolder::CleanUp() {
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, List());
  absl::Status first;
  for (const CheckpointEntry& entry : entries) {
    if (entry.state == CheckpointState::kWriting || entry.state == CheckpointState::kDeleting)
      first.Update(Remove(entry));
  }
  return first;
}

absl::Status RunFolder::Retain(uint32_t kept, uint64_t replaced, std::optional<uint64_t> spares) {
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, List());
  const uint64_t spared = spares ? SparedOf(entries, replaced, *spares) : 0;
  absl::Status first;
  uint32_t newer = 0;  // that count
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    const uint64_t number = entry->place.number;
    const bool is_read = number <= read_ || number > passed_over_;
    const bool counts = entry->state == CheckpointState::kKept && is_read;
    const bool is_replaced = counts && number == replaced;
    const bool may_go = entry->state == CheckpointState::kKept || entry->state == CheckpointState::kSetAside;
    const bool goes = is_replaced || (newer >= kept && may_go);
    // What waits for the command is the newest of the run, so none that goes can come to be used meanwhile.
    const bool used = command_ != nullptr && command_->Uses(PathOf(*entry));
    if (goes && !used && number != spared) first.Update(Remove(*entry));
    if (counts && !is_replaced) ++newer;
  }
  return first;
}

absl::Status RunFolder::RemoveAll() {
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> found, fs_->List(path_));
  for (const Fs::Entry& one : found) {
    const bool is_known = ParseCheckpointName(one.name) || one.name == kJournalFolder || one.name == kTagsFolder;
    if (one.kind == Fs::Kind::kFolder && is_known) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(path_, " is left: ", one.name, " in it is no checkpoint; move it away, and delete the run again"));
  }
  if (command_ != nullptr) {
    for (const Fs::Entry& one : found) command_->Withdraw(absl::StrCat(path_, "/", one.name));
  }
  std::string removed;
  absl::Status renamed = absl::AlreadyExistsError("");
  // What is left of an earlier run of this name may be there.
  for (int n = 1; absl::IsAlreadyExists(renamed); ++n) {
    removed = absl::StrCat(runs_, "/", kRemovedPrefix, n, "-", path_.substr(runs_.size() + 1));
    renamed = fs_->Rename(path_, removed);
  }
  RETURN_IF_ERROR(renamed);
  RETURN_IF_ERROR(fs_->SyncFolder(runs_));
  path_ = removed;
  return RemoveCheckpoints();
}

absl::Status RunFolder::RemoveCheckpoints() {
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, List());
  for (const CheckpointEntry& entry : entries) RETURN_IF_ERROR(RemoveFiles(PathOf(entry)));
  RETURN_IF_ERROR(RemoveJournal(fs_, absl::StrCat(path_, "/", kJournalFolder)));
  RETURN_IF_ERROR(RemoveTags(fs_, absl::StrCat(path_, "/", kTagsFolder)));
  return fs_->RemoveFolder(path_);
}

absl::Status RunFolder::CleanUpRemoved(Fs* fs, const std::string& runs) {
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> found, fs->List(runs));
  absl::Status first;
  for (const Fs::Entry& one : found) {
    if (one.kind != Fs::Kind::kFolder || !absl::StartsWith(one.name, kRemovedPrefix)) continue;
    first.Update(RunFolder(fs, absl::StrCat(runs, "/", one.name), runs).RemoveCheckpoints());
  }
  return first;
}

}  // namespace ballast
