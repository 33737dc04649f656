// The memory of chunks that have left, for those to come: a page that is new to the process costs more than a copy into it,
// and an allocator gives large blocks back to the system. What is copied there may be of the trainer's GPU. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "proto/gpu/gpu.h"

namespace ballast {

class ChunkMemory {
 public:
  static constexpr uint64_t kMostKept = 64 << 20;     // bytes: more than the credit of most runs
  static constexpr uint64_t kLeastReused = 64 << 10;  // of a chunk; an allocator keeps smaller blocks itself

  explicit ChunkMemory(std::shared_ptr<Gpu> gpu = nullptr) : gpu_(std::move(gpu)) {}

  // A copy of the bytes; anything, if the GPU has failed.
  std::string Copy(absl::Span<const std::byte> bytes);
  // What a copy from the GPU has failed with, the first.
  absl::Status status() const;
  // These are no longer needed; the vector is empty then.
  void Keep(std::vector<std::string>* chunks);
  uint64_t kept_bytes() const;

 private:
  const std::shared_ptr<Gpu> gpu_;
  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> kept_ ABSL_GUARDED_BY(mu_);
  uint64_t kept_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ballast
