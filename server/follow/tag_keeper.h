// The versions of a run that have names. Where the run has a disk each is a file there (version_file.h), written beside the
// steps, synced and renamed before its name counts, and read a chunk at a time; elsewhere it is kept in host memory.
//
//   keeper->Load();                                        // what is on the disk
//   keeper->Add({"good"}, version, [](auto tagged) {...});
//   keeper->Open("good", [](auto stored) {...});           // a file: stored->Read(tensor, chunk, ...)
//
// Names outlive rewinds and replaced weights: a version never changes. Strand-confined; held by a shared_ptr, since what
// is under way may answer when it is gone. Each `done` is called once, on the strand.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/base/strand.h"
#include "server/follow/version.h"
#include "server/follow/version_file.h"
#include "server/spec/run_spec.h"
#include "server/step/coverage.h"
#include "server/storage/disk_threads.h"
#include "server/storage/file_writer.h"
#include "server/storage/fs.h"
#include "server/storage/tag_files.h"

namespace ballast {

// One version: by its name or, where that is empty, by its id, in which a generation or an epoch of 0 stands for any.
struct VersionChoice {
  std::string tag = {};
  VersionId id = {};
  bool Is(const VersionId& other) const {
    return id.step == other.step && (id.generation == 0 || id.generation == other.generation) &&
           (id.epoch == 0 || id.epoch == other.epoch);
  }
};

// A version that has a name: ballast.v1.TaggedVersion.
struct VersionTag {
  std::string name;
  VersionId id = {};
  uint64_t bytes = 0;
  double closed_unix_s = 0, tagged_unix_s = 0;
  std::string file = {};        // empty: it is in memory
  std::string unreadable = {};  // why; empty: it can be read
  uint64_t mark = 0;            // of those that were named together with it on other daemons
};

// A version on the disk that is being read.
class StoredVersion : public std::enable_shared_from_this<StoredVersion> {
 public:
  using Done = std::function<void(absl::StatusOr<VersionPiecePtr> piece)>;
  // `disk` reads, `strand` is told; both outlive the reads.
  StoredVersion(std::unique_ptr<VersionFile> file, Strand* disk, Strand* strand)
      : file_(std::move(file)), info_(file_->info()), disk_(disk), strand_(strand) {}

  const VersionFileInfo& info() const { return info_; }
  void Read(uint32_t tensor, uint64_t chunk, Done done);

 private:
  const std::unique_ptr<VersionFile> file_;  // disk_'s
  const VersionFileInfo info_;
  Strand* const disk_;
  Strand* const strand_;
};

// Where a run's versions with names are kept; without `fs` in memory. What is pointed to outlives the keeper.
struct TagStorage {
  Fs* fs = nullptr;
  DiskThreads* threads = nullptr;
  RateLimit* rate = nullptr;
  std::string run_folder = {};
};

class TagKeeper : public std::enable_shared_from_this<TagKeeper> {
 public:
  struct Environment {
    const RunSpec* spec;  // whose `follow` is there
    ChunkSet::Starts chunk_starts;
    uint64_t version_bytes = 0;  // what one takes of `memory`
    std::shared_ptr<FollowMemory> memory;
    Strand* strand;
    TagStorage storage = {};
    std::function<void()> changed;  // the names
  };
  struct Order {
    std::string name;
    bool replace = false;
    uint64_t mark = 0;                   // VersionTag's
    std::optional<VersionId> only = {};  // this version, and no other
  };
  struct Tagged {
    VersionTag tag;
    bool created = false;
  };
  using Done = absl::AnyInvocable<void(absl::StatusOr<Tagged>)>;
  struct Entry {
    VersionTag tag;
    uint64_t number = 0;                                     // of its file
    std::shared_ptr<const WeightVersion> version = nullptr;  // where it is in memory
  };

  explicit TagKeeper(Environment environment);
  ~TagKeeper() { End(absl::CancelledError("the run is over")); }

  bool on_disk() const { return environment_.storage.fs != nullptr; }
  // Reads what is on the disk, and waits for it. What is wrong there is told by each later call.
  void Load();
  const std::map<std::string, Entry>& entries() const { return entries_; }
  uint64_t bytes() const;

  // The name, where the version that the order is for has it already; nullptr: it does not, or is not known.
  const VersionTag* Given(const Order& order) const;
  // OK: Add would take this name for this version, if the disk does. `id`: none, it is not known yet.
  absl::Status Check(const Order& order, const std::optional<VersionId>& id) const;
  // The version gets the name, and is kept. ABORTED: it is not the one that the order is for.
  void Add(Order order, std::shared_ptr<const WeightVersion> version, Done done);
  // The same of one that has a name already.
  void AddAgain(Order order, const Entry& from, Done done);
  void Remove(const std::string& name, absl::AnyInvocable<void(absl::Status)> done);
  // nullptr: none has this name, or is this version.
  const Entry* Find(const VersionChoice& choice) const;
  // Of one that is on the disk.
  void Open(const Entry& entry, std::function<void(absl::StatusOr<std::shared_ptr<StoredVersion>>)> done);
  // "'a' (step 3), 'b' (step 7)", or "none".
  std::string Describe() const;
  // What is under way is answered with this status, and comes to nothing.
  void End(const absl::Status& why);

 private:
  // What the thread of the disk does for Add.
  struct Writing {
    TagStorage storage;
    const RunSpec* spec;
    ChunkSet::Starts chunk_starts;
    std::shared_ptr<const WeightVersion> version;  // nullptr: it is read from `from`
    std::string from;
    std::shared_ptr<FollowMemory> memory;
    uint64_t version_bytes = 0;
    VersionFileInfo info;
    TagFile file;
    std::string replaces;  // a file; empty: none
    std::shared_ptr<const std::atomic<bool>> cancelled;
  };

  std::string folder() const;
  absl::Status CheckName(const std::string& name) const;
  void Insert(Entry entry);
  void Write(Writing writing, Order order, Done done);
  static absl::StatusOr<VersionTag> WriteNow(Writing* writing);
  static absl::Status WriteFileOf(const Writing& writing, const std::string& folder);
  static absl::StatusOr<std::shared_ptr<const WeightVersion>> ReadWhole(const Writing& writing);

  const Environment environment_;
  absl::Status load_status_;
  std::map<std::string, Entry> entries_;
  uint64_t last_number_ = 0;                               // of a file
  absl::AnyInvocable<void(absl::Status)> busy_ = nullptr;  // how to end what is under way on the disk
  uint64_t calls_ = 0;                                     // of the disk's thread; the last is the one under way
  std::shared_ptr<std::atomic<bool>> cancelled_;
  std::unique_ptr<Strand> disk_;  // none: in memory. Last: its thread ends first
};

}  // namespace ballast
