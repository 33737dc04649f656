// Writes a run's checkpoints in the background, one after another: the files of one side by side, then its manifest, and
// then it is published.
//
//   CheckpointWriter writer({.fs = SystemFs(), .threads = &threads, .rate = &rate});
//   writer.Write({.folder = folder, .run_id = "r1", .step = 120, .content = [] {...}, ...}, [](auto written) {...});
//
// The memory that the files' pieces lie in does not change until `done`. CANCELLED: the order was, or the writer was
// stopped; that takes as long as the block in hand. After an error nothing of the checkpoint is
// left in the folder, where the file system lets it be removed; what is left does not count, and goes when a daemon
// starts. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "ballast/v1/checkpoint.pb.h"
#include "server/storage/disk_threads.h"
#include "server/storage/file_writer.h"
#include "server/storage/fs.h"
#include "server/storage/run_folder.h"

namespace ballast {

// What a checkpoint holds. `owned` keeps what the pieces lie in, as far as the caller does not.
struct CheckpointContent {
  std::vector<FileContent> files;  // of names that differ
  std::shared_ptr<const void> owned;
};

struct CheckpointOrder {
  std::shared_ptr<RunFolder> folder;
  std::string run_id;
  std::string spec_sha256;
  uint64_t step = 0, generation = 0;
  absl::AnyInvocable<CheckpointContent()> content;  // called on the writer's thread
  std::shared_ptr<const std::atomic<bool>> cancelled = std::make_shared<const std::atomic<bool>>(false);
  uint32_t retain = 2;                  // checkpoints, this one included
  uint64_t replaces = 0;                // the number of one that has the same state, and goes; 0: none
  std::optional<uint64_t> spares = {};  // as RunFolder::Retain's
};

struct CheckpointWritten {
  CheckpointPlace place = {};
  std::string folder = {};
  uint64_t bytes = 0;          // of all files
  double write_seconds = 0;    // until all files were synced
  double publish_seconds = 0;  // since
  double age_seconds = 0;      // since it was published, of one that was read
  // It is published all the same: older ones could not be removed.
  absl::Status retained = absl::OkStatus();
};

class CheckpointWriter {
 public:
  struct Options {
    // All outlive the writer.
    Fs* fs = nullptr;
    DiskThreads* threads = nullptr;
    RateLimit* rate = nullptr;
  };
  using Done = absl::AnyInvocable<void(absl::StatusOr<CheckpointWritten>)>;

  explicit CheckpointWriter(Options options);
  ~CheckpointWriter();  // as Stop

  // `done` is called once, on the writer's thread, or on the caller's when it was stopped.
  void Write(CheckpointOrder order, Done done);
  // Does something else on the writer's thread, in turn: what changes a run's folder beside writing.
  void Run(absl::AnyInvocable<void()> task);
  // What is under way ends with CANCELLED as soon as the block in hand is written, and so does all that was asked for.
  void Stop();

 private:
  struct Job {
    CheckpointOrder order;
    Done done;
    absl::AnyInvocable<void()> task;  // in place of the two
  };
  void Loop();
  void Add(Job job);
  absl::StatusOr<CheckpointWritten> WriteNow(CheckpointOrder* order);
  absl::Status WriteContent(CheckpointOrder* order, const std::string& path, CheckpointWritten* written);
  // Side by side. Their entries for the manifest, by name.
  absl::StatusOr<std::vector<v1::CheckpointFile>> WriteFiles(const CheckpointOrder& order, const std::string& folder,
                                                             const std::vector<FileContent>& files);
  absl::Status WriteText(const CheckpointOrder& order, const std::string& folder, absl::string_view name,
                         const std::string& text);

  // Asked before each block is written.
  std::function<absl::Status(uint64_t bytes)> Leave(const CheckpointOrder& order);

  const Options options_;
  absl::Mutex mu_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mu_);
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ballast
