#include "client/cpp/stream/chunk_memory.h"

#include <utility>

namespace ballast {

std::string ChunkMemory::Copy(absl::Span<const std::byte> bytes) {
  std::string chunk;
  if (bytes.size() >= kLeastReused) {
    absl::MutexLock lock(&mu_);
    if (!kept_.empty()) {
      chunk = std::move(kept_.back());
      kept_.pop_back();
      kept_bytes_ -= chunk.capacity();
    }
  }
  if (gpu_ == nullptr || !gpu_->Owns(bytes.data())) {
    chunk.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return chunk;
  }
  chunk.resize(bytes.size());
  const absl::Status copied = gpu_->Copy(chunk.data(), bytes.data(), bytes.size());
  absl::MutexLock lock(&mu_);
  status_.Update(copied);
  return chunk;
}

absl::Status ChunkMemory::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

void ChunkMemory::Keep(std::vector<std::string>* chunks) {
  {
    absl::MutexLock lock(&mu_);
    for (std::string& chunk : *chunks) {
      if (chunk.capacity() < kLeastReused || kept_bytes_ + chunk.capacity() > kMostKept) continue;
      kept_bytes_ += chunk.capacity();
      kept_.push_back(std::move(chunk));
    }
  }
  chunks->clear();
}

uint64_t ChunkMemory::kept_bytes() const {
  absl::MutexLock lock(&mu_);
  return kept_bytes_;
}

}  // namespace ballast
