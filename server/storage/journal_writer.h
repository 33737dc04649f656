// Writes a run's journal in the background: a stream of bytes, in files that each begin where a checkpoint was begun.
//
//   JournalWriter writer({.fs = fs, .folder = folder, .on_synced = ..., .on_room = ..., .on_failed = ...});
//   writer.BeginSegment(head, /*continues=*/false);
//   size_t taken = writer.Append(bytes);     // less than all: on_room says when there is room for more
//   writer.Commit(7);                        // on_synced(7): all that was appended is on the disk
//
// After an error the file is given up, and nothing is written until a segment begins that continues none. The callbacks
// come on the writer's thread. Append, Commit and BeginSegment are for one thread; the destructor waits until what was
// handed over is written.
#pragma once

#include <array>
#include <cstddef>
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
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

#include "server/storage/file_writer.h"
#include "server/storage/fs.h"
#include "server/storage/journal_frames.h"
#include "server/storage/journal_record.h"

namespace ballast {

class JournalWriter {
 public:
  // Memory that what is not yet written lies in.
  static constexpr size_t kBlocks = 4;
  static constexpr uint64_t kBytes = kBlocks * DiskBuffer::kBytes;

  struct Options {
    Fs* fs = nullptr;    // outlives the writer
    std::string folder;  // of the journal; made if it is not there
    std::function<void(uint64_t serial)> on_synced;
    std::function<void(double seconds)> on_sync_took = [](double) {};
    std::function<void()> on_room;
    std::function<void(absl::Status why)> on_failed;
  };

  // std::bad_alloc: the system has no memory for the blocks.
  explicit JournalWriter(Options options);
  ~JournalWriter();

  // What is appended from now on comes to a new file, after this. What was appended before is on the disk first.
  void BeginSegment(const SegmentHead& head);
  size_t Append(absl::Span<const std::byte> bytes);
  // serial: ascending.
  void Commit(uint64_t serial);
  // Removes the files before the one that begins with this identity; none, where there is no such file.
  void RemoveBefore(uint64_t base);
  // Removes the file that begins with this identity, also if it is the one that is written.
  void Remove(uint64_t base);
  // Removes all files, also the one that is written; `done` is told how that went, on the writer's thread.
  void RemoveAll(absl::AnyInvocable<void(absl::Status)> done);

 private:
  struct Job {
    enum class What { kWrite, kSync, kBegin, kTask } what = What::kTask;
    size_t block = 0;
    uint32_t bytes = 0;
    uint64_t serial = 0;
    SegmentHead head = {};
    absl::AnyInvocable<void()> task = nullptr;
  };
  // Of the thread that appends.
  void HandOver();
  void Add(Job job);
  // Of the writer's own.
  void Loop();
  void Do(Job* job);
  absl::Status Begin(const SegmentHead& head);
  absl::Status WriteHead(const SegmentHead& head);
  absl::Status WriteBlock(size_t block, uint32_t bytes);
  absl::Status SyncFile();
  absl::Status MakeFolder();
  void Free(size_t block);

  const Options options_;
  std::array<DiskBuffer, kBlocks> blocks_;
  // Of the thread that appends: the block in hand, if there is one.
  std::optional<size_t> filling_;
  uint32_t filled_ = 0;
  // Of the writer's own.
  std::unique_ptr<OutputFile> file_;
  std::string path_;
  uint64_t number_ = 0, at_ = 0, sequence_ = 0, synced_ = 0;
  bool named_ = false;   // the file's name is on the disk
  bool failed_ = false;  // until a segment begins that continues none

  absl::Mutex mu_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mu_);
  std::vector<size_t> free_ ABSL_GUARDED_BY(mu_);
  bool wants_room_ ABSL_GUARDED_BY(mu_) = false;  // somebody waits for a block
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ballast
