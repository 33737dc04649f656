// A file system in memory that knows what a power cut may leave of it: of each file the writes that were synced, and any
// of those that were not; of each folder the names that were synced, and any of the later ones. Syncing a file does not
// sync its name, and the other way round (POSIX promises no more, and some file systems keep no more).
//
//   ModelFs fs;
//   fs.CutAt(17);                         // the 17th call and all after it fail, as if the process were gone
//   ... run the code ...
//   for (int seed = 0; seed < 100; ++seed) Check(fs.AfterCut(seed));
//
// Thread-safe, but for AfterCut, which is for when the code has returned.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/storage/fs.h"

namespace ballast {

class ModelFs final : public Fs {
 public:
  ModelFs();
  ~ModelFs() override;

  // What may be there after the power was cut now. Seed 0: nothing that was not synced; seed 1: all of it; others: drawn.
  std::unique_ptr<ModelFs> AfterCut(uint64_t seed) const;
  // Calls so far that may fail.
  int calls() const;
  // From this call on, counted from 1, all fail.
  void CutAt(int call);
  // This one fails with the status, and has no effect; a Sync that fails leaves its data as it may be lost for good.
  void FailAt(int call, absl::Status status);
  // This one does nothing, and says that it has: for tests of tests.
  void SkipAt(int call);
  // Writes that need more fail with RESOURCE_EXHAUSTED.
  void set_capacity(uint64_t bytes);
  // What each call was: "sync /d/a", ...
  std::vector<std::string> log() const;

  // Damage. The file is there.
  std::string Content(const std::string& path) const;
  void SetContent(const std::string& path, std::string content);
  bool Exists(const std::string& path) const;

  absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path) override;
  absl::Status MakeFolder(const std::string& path) override;
  absl::StatusOr<std::vector<Entry>> List(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveFolder(const std::string& path) override;
  absl::Status SyncFolder(const std::string& path) override;
  absl::StatusOr<Space> SpaceOf(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FolderLock>> Lock(const std::string& path) override;

 private:
  friend class ModelOutputFile;
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  using Names = std::map<std::string, NodePtr>;
  // Of a file's bytes, or of a folder's names.
  struct Change {
    uint64_t offset = 0;
    std::string bytes = {};
    std::optional<uint64_t> size = {};  // SetSize, in place of the two
    std::string gone = {}, come = {};   // names; either may be empty
    NodePtr node = {};                  // of `come`
  };
  struct Node {
    bool is_folder = false;
    std::string content;
    Names names;
    // As on the disk, and what came since.
    std::string synced_content;
    Names synced_names;
    std::vector<Change> unsynced;
    bool given_up = false;  // a sync has failed: later ones say that they have synced, and have not
  };
  // What is to become of the call.
  enum class Fate { kDo, kSkip };
  absl::StatusOr<Fate> Count(std::string what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  NodePtr Find(const std::string& path) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  NodePtr Parent(const std::string& path) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status Enter(const std::string& path, NodePtr node);
  absl::Status Leave(const std::string& path, bool folder);
  absl::Status SyncNode(const NodePtr& node, const std::string& what);
  absl::Status Store(const NodePtr& node, const std::string& path, Change change);
  static void Apply(const Change& change, Node* node);
  static NodePtr Survivor(const Node& node, uint64_t seed, uint64_t* draw);
  uint64_t UsedBytes(const Node& node) const;

  mutable absl::Mutex mu_;
  NodePtr root_ ABSL_GUARDED_BY(mu_);
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<int> cut_at_ ABSL_GUARDED_BY(mu_);
  std::map<int, absl::Status> fail_at_ ABSL_GUARDED_BY(mu_);
  std::optional<int> skip_at_ ABSL_GUARDED_BY(mu_);
  std::optional<uint64_t> capacity_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> log_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int> locks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
