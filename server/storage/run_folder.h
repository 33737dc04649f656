// The folder of one run: its checkpoints by number, and how they come, are set aside and go (proto/CHECKPOINTS.md).
// Every change is made so that a power cut at any moment leaves what was there before, or what is there afterwards.
//
//   ASSIGN_OR_RETURN(RunFolder folder, RunFolder::Open(fs, "/data/runs", "r1"));
//   ASSIGN_OR_RETURN(std::string path, folder.Begin(place));     // write the files there
//   RETURN_IF_ERROR(folder.Publish(place));                      // now it counts
//
// Names that are not a checkpoint's are let alone. Not thread-safe: a run's folder is changed by one thread at a time.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/storage/fs.h"
#include "server/storage/published_command.h"

namespace ballast {

// A checkpoint's number in its run, and its step.
struct CheckpointPlace {
  uint64_t number = 0, step = 0;
  bool operator==(const CheckpointPlace&) const = default;
};
// "000000000007-step-120"
std::string NameOf(const CheckpointPlace& place);

enum class CheckpointState { kKept, kSetAside, kWriting, kDeleting };

struct CheckpointEntry {
  CheckpointPlace place;
  CheckpointState state = CheckpointState::kKept;
  std::string name;  // of its folder
  bool counts() const { return state == CheckpointState::kKept; }
};
// Of a folder's name; none: it is not a checkpoint's.
std::optional<CheckpointEntry> ParseCheckpointName(absl::string_view name);

class RunFolder {
 public:
  // Made if it is not there. `runs` is there. FAILED_PRECONDITION: a link, or a file, has the name of a checkpoint that
  // counts: passing it over would take the run back in silence. `command` is run for what is published, and keeps what it runs on from
  // Retain; it outlives the folder; none: nullptr.
  static absl::StatusOr<RunFolder> Open(Fs* fs, const std::string& runs, const std::string& run_id,
                                        PublishedCommand* command = nullptr);

  const std::string& path() const { return path_; }
  std::string PathOf(const CheckpointEntry& entry) const;
  // Ascending by number.
  absl::StatusOr<std::vector<CheckpointEntry>> List() const;
  // A number higher than all that are there.
  absl::StatusOr<uint64_t> NextNumber() const;

  // An empty folder to write the checkpoint's files to. The run's own is made anew where somebody has removed it: the run
  // lives, and what is in it counts from then on. FAILED_PRECONDITION: the folder of all runs is gone, too.
  absl::StatusOr<std::string> Begin(const CheckpointPlace& place);
  // All files are written and synced.
  absl::Status Publish(const CheckpointPlace& place);
  // The number of the newest that counts, where all of those are of later steps. 0: none counts, or one of this step or
  // before does.
  absl::StatusOr<uint64_t> NewestIfAllAfter(uint64_t step) const;
  // Those of later steps, up to this number, count no more: their steps have been undone.
  absl::Status SetAside(uint64_t after_step, uint64_t last_number = std::numeric_limits<uint64_t>::max());
  // Those with a higher number than this one are damaged, of those that are there now: Retain does not count them. To be
  // called before anything is written.
  absl::Status PassOver(uint64_t number);
  // Somebody wants this one, which is the newest, elsewhere too: as PublishedCommand::OfferAgain.
  void OfferAgain(const CheckpointPlace& place) const;
  // Removes the files that a checkpoint has, and its folder where nothing else is in it.
  absl::Status Remove(const CheckpointEntry& entry);
  // Removes what was not published, and what was being removed.
  absl::Status CleanUp();
  // Removes all but the newest `kept` of those that count, and the one with the number `replaced`, which is none of them;
  // one that the command runs on goes another time. `spares`: of those that count the newest of this step stays besides, or
  // where there is none the oldest.
  absl::Status Retain(uint32_t kept, uint64_t replaced = 0, std::optional<uint64_t> spares = {});
  // The run is no more: its folder is renamed first, so that none of its checkpoints comes back. Nothing may be asked of
  // the folder afterwards. FAILED_PRECONDITION, and nothing is changed: something else is in it.
  absl::Status RemoveAll();
  // Removes what is left of runs that were removed.
  static absl::Status CleanUpRemoved(Fs* fs, const std::string& runs);

 private:
  RunFolder(Fs* fs, std::string path, std::string runs, PublishedCommand* command = nullptr)
      : fs_(fs), path_(std::move(path)), runs_(std::move(runs)), command_(command) {}
  absl::Status SetAside(const CheckpointEntry& entry);  // which counts
  absl::Status MakeAnew();
  absl::Status RenameSynced(const std::string& from, const std::string& to);
  absl::Status RemoveFiles(const std::string& folder);
  absl::Status RemoveCheckpoints();

  Fs* fs_;
  std::string path_, runs_;
  PublishedCommand* command_;
  uint64_t read_ = 0, passed_over_ = 0;  // PassOver's number, and the highest then
};

}  // namespace ballast
