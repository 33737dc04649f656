// A file system in memory that knows what a power cut may leave of it: of each file the writes that were synced, and any
// of those that were not; of each folder the names that were synced, and any of the later ones. Syncing a file does not
// sync its name, and the other way round (POSIX promises no more, and some file systems keep no more).
//
//   ModelFs fs;
//   fs.CutAt(17);                         // the 17th call and all after it fail, as if the process were gone
//   ... run the code ...
//   Outcomes outcomes(fs, 1000);          // all states that the disk may be in, or, if they are more, 1000 of them
//   while (const auto left = outcomes.Next()) Check(left.get());   // outcomes.h
//
// What may become of each change that was not synced, whatever becomes of the others:
// - a write: nothing of it is there, or all, or what comes before one of the sector boundaries in it;
// - a new size: it is there or not;
// - a name that was made, changed or removed: it was or it was not. A file has its old name or its new one, never both.
//
// Thread-safe. Its files go before it does.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

#include "server/storage/fs.h"
#include "tests/server/storage/model_node.h"

namespace ballast {

class ModelFs final : public Fs {
 public:
  static constexpr uint64_t kSector = ModelChange::kSector;
  // What became of a change that was not synced, of so many things (2 or more). 0: it is lost. The last: all of it is
  // there. Those between: of a write, what comes before its first sector boundary, its second, ...
  using Choose = ModelNode::Choose;

  ModelFs();
  ~ModelFs() override;

  // A disk on which the power was cut now. Without locks, failures and cuts to come.
  std::unique_ptr<ModelFs> AfterCut(Choose choose) const;
  // Seed 0: nothing that was not synced; seed 1: all of it; others: drawn.
  std::unique_ptr<ModelFs> AfterCut(uint64_t seed) const;

  // Calls so far that may fail: all that change something, and a lock.
  int calls() const {
    absl::MutexLock lock(&mu_);
    return calls_;
  }
  // Until there were so many, or one of them has failed.
  void AwaitCalls(int calls) const;
  // What each call was: "sync /d/a", ...
  std::vector<std::string> log() const;
  // Calls that only read count, too, from now on.
  void set_counts_reads(bool counts);
  // This call, counted from 1, and all after it fail, those that only read as well.
  void CutAt(int call);
  // This one fails with the status, and has no effect, but that of a write `written` bytes are there. What a Sync or
  // SyncFolder that fails was to keep may be lost for good: a later one that succeeds does not keep it.
  void FailAt(int call, absl::Status status, uint64_t written = 0);
  // This one does nothing, and says that it has: for tests of tests.
  void SkipAt(int call);
  // Writes that need more fail with RESOURCE_EXHAUSTED; what fits of them is there.
  void set_capacity(uint64_t bytes);
  // A file's Sync keeps its name and those of the folders above it, as with ext4 and XFS.
  void set_sync_keeps_name(bool keeps);

  // What is there, and damage to it, which is on the disk at once. The file is there, else std::invalid_argument.
  bool Exists(const std::string& path) const;
  std::string Content(const std::string& path) const;
  void SetContent(const std::string& path, std::string content);
  void Flip(const std::string& path, uint64_t byte, int bit);
  void Truncate(const std::string& path, uint64_t bytes);
  // All names, one a line, files with their sizes: for messages.
  std::string Dump() const;

  absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path) override;
  absl::Status MakeFolder(const std::string& path) override;
  absl::StatusOr<std::vector<Entry>> List(const std::string& path) override;
  // INVALID_ARGUMENT: not within one folder.
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveFolder(const std::string& path) override;
  absl::Status SyncFolder(const std::string& path) override;
  absl::StatusOr<Space> SpaceOf(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FolderLock>> Lock(const std::string& path) override;

 private:
  friend class ModelInputFile;
  friend class ModelOutputFile;
  struct Locks;
  using NodePtr = std::shared_ptr<ModelNode>;
  // What is to become of a call that does not fail.
  enum class Fate { kDo, kSkip };
  struct Failure {
    absl::Status status;
    uint64_t written = 0;
  };

  absl::StatusOr<Fate> Count(const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CountRead(const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<NodePtr> Find(absl::string_view path) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::StatusOr<NodePtr> FindFolder(absl::string_view path) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  NodePtr FileAt(const std::string& path) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  uint64_t Room() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::StatusOr<NodePtr> Make(const char* what, const std::string& path, bool folder);
  absl::Status Remove(const char* what, const std::string& path, bool folder);
  absl::Status Store(const NodePtr& node, const std::string& path, ModelChange change);
  absl::Status SyncFile(const NodePtr& node, const std::string& path);
  absl::Status Read(const NodePtr& node, const std::string& path, uint64_t offset, absl::Span<std::byte> to);

  mutable absl::Mutex mu_;
  NodePtr root_ ABSL_GUARDED_BY(mu_);
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  bool failed_ ABSL_GUARDED_BY(mu_) = false;
  bool counts_reads_ ABSL_GUARDED_BY(mu_) = false, sync_keeps_name_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<int> cut_at_ ABSL_GUARDED_BY(mu_), skip_at_ ABSL_GUARDED_BY(mu_);
  std::map<int, Failure> failures_ ABSL_GUARDED_BY(mu_);
  std::optional<uint64_t> capacity_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> log_ ABSL_GUARDED_BY(mu_);
  const std::shared_ptr<Locks> locks_;  // which may be held for longer than this lives
};

}  // namespace ballast
