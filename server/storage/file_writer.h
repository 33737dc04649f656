// Writes one file from pieces of memory: past the page cache where that is possible, in blocks of 2 MiB, one of which is
// written while the next one's checksums are made, and synced at the end.
//
//   DiskBuffer buffer;
//   ASSIGN_OR_RETURN(v1::CheckpointFile entry, WriteFile(fs, folder, {"a.safetensors", pieces}, buffer, leave));
//
// Thread-safe, with a buffer for each thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

#include "ballast/v1/checkpoint.pb.h"
#include "server/base/stop_signal.h"
#include "server/storage/fs.h"

namespace ballast {

// What a file holds: the pieces, one after another.
struct FileContent {
  std::string name;
  std::vector<absl::Span<const std::byte>> pieces;
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const auto& piece : pieces) sum += piece.size();
    return sum;
  }
};

// Memory that files are read and written by, the kernel's own: malloc would keep it for one thread's later use (main.cc), and a
// run's journal has four. A movable owner.
class DiskBuffer {
 public:
  static constexpr uint64_t kBytes = uint64_t{4} << 20;
  DiskBuffer();
  absl::Span<std::byte> bytes() const { return {data_.get(), kBytes}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;  // aligned to OutputFile::kDirect
};

// Holds all who write to so many bytes a second together. Thread-safe.
class RateLimit {
 public:
  explicit RateLimit(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}  // 0: none
  // Waits until so many may be written. false: Stop was called.
  bool Take(uint64_t bytes);
  // Nobody waits any more.
  void Stop();

 private:
  const uint64_t bytes_per_s_;
  absl::Mutex mu_;
  double free_at_s_ ABSL_GUARDED_BY(mu_) = 0;  // MonotonicSeconds: when all that was taken has been written
  StopSignal stopped_;
};

// A new file in the folder. Its checksums, once it is synced. `leave` is asked before each block is written, on another
// thread, and may wait; an error of its ends the file. With an error, what is there of the file is to be removed.
absl::StatusOr<v1::CheckpointFile> WriteFile(Fs* fs, const std::string& folder, const FileContent& content,
                                             const DiskBuffer& buffer,
                                             absl::FunctionRef<absl::Status(uint64_t bytes)> leave);

}  // namespace ballast
