// A few threads, each with a buffer of its own, that read and write files side by side: one alone does not keep a fast
// disk busy, since it also computes checksums.
//
//   status = threads.ForEach(files.size(), [&](size_t file, const DiskBuffer& buffer) {...});   // waits for all
//
// Thread-safe: callers share the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "server/storage/file_writer.h"

namespace ballast {

class DiskThreads {
 public:
  explicit DiskThreads(int threads);
  ~DiskThreads();  // when nobody waits
  DiskThreads(const DiskThreads&) = delete;
  DiskThreads& operator=(const DiskThreads&) = delete;

  using Task = absl::FunctionRef<absl::Status(size_t index, const DiskBuffer& buffer)>;
  // Calls task(0), ..., task(count - 1), begun in that order, and returns when all are done. Once one has failed, no other
  // is begun; returns the status of the first that did.
  absl::Status ForEach(size_t count, Task task);
  // That the threads have, whether or not they are used.
  uint64_t buffer_bytes() const { return threads_.size() * DiskBuffer::kBytes; }

 private:
  struct Batch {
    Task task;
    size_t count, next = 0, done = 0;
    absl::Status status = {};
  };
  void Loop();

  absl::Mutex mu_;
  std::deque<Batch*> batches_ ABSL_GUARDED_BY(mu_);  // of which some task was not begun
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ballast
