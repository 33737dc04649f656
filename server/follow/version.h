// Versions of a run's weights, as readers that follow it get them: immutable, in host memory, and shared by all who send
// them. A chunk that a step has left as it was is in both versions, and there once.
//
// Thread-safe, being immutable; FollowMemory by atomics.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "proto/changes.h"

#include "server/spec/run_spec.h"

namespace ballast {

// A rewind raises the generation, and steps are then counted anew. Versions of other epochs are of other weights.
struct VersionId {
  uint64_t epoch = 0, generation = 0, step = 0;
  bool operator==(const VersionId&) const = default;
};

// What versions, and what they have changed, take of host memory, of what the plan has for them.
class FollowMemory {
 public:
  explicit FollowMemory(uint64_t most) : most_(most) {}
  uint64_t used() const { return used_; }
  uint64_t left() const { return most_ - std::min(most_, used_.load()); }

  // So much of it, until it goes. A movable owner.
  class Share {
   public:
    Share() = default;
    Share(std::shared_ptr<FollowMemory> memory, uint64_t bytes) : memory_(std::move(memory)), bytes_(bytes) {
      memory_->used_ += bytes_;
    }
    Share(Share&& other) noexcept : memory_(std::move(other.memory_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Share& operator=(Share&& other) noexcept {
      std::swap(memory_, other.memory_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Share() {
      if (memory_ != nullptr) memory_->used_ -= bytes_;
    }

   private:
    std::shared_ptr<FollowMemory> memory_;
    uint64_t bytes_ = 0;
  };

 private:
  const uint64_t most_;
  std::atomic<uint64_t> used_ = 0;
};

// A chunk's weights in the serving format.
struct VersionPiece {
  std::unique_ptr<const std::byte[]> memory;
  uint64_t size = 0;
  std::vector<float> scales;
  uint32_t crc32c = 0;  // of the codes
  FollowMemory::Share share = {};
  absl::Span<const std::byte> codes() const { return {memory.get(), size}; }
  uint64_t bytes() const { return size + scales.size() * sizeof(float); }
};
using VersionPiecePtr = std::shared_ptr<const VersionPiece>;

struct WeightVersion {
  VersionId id;
  uint64_t number = 0;       // counts the run's versions, from 1
  double closed_unix_s = 0;  // when its step closed
  uint64_t bytes = 0;
  std::vector<VersionPiecePtr> pieces;  // by chunk of the run: ChunkStarts (run_spec.h)
  std::vector<uint64_t> digests;        // by tensor, like the next
  std::vector<uint64_t> stored;         // ParameterStore::version that it was encoded of
};

// What a chunk is in one version and was not in the one before.
struct ChangedPiece {
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  bool last = false;               // of the tensor, that comes
  uint64_t digest = 0;             // with the last: of all of the tensor
  VersionPiecePtr whole = {};      // the chunk as it is now, where that takes few enough bytes; else
  Changes changes = {};            // what it has changed,
  std::vector<float> scales = {};  // its scales,
  uint32_t crc32c = 0;             // and the checksum of the changes' positions and values
  // What goes out.
  uint64_t bytes() const { return whole != nullptr ? whole->bytes() : changes.bytes() + scales.size() * sizeof(float); }
};

// From one version to the next.
struct VersionChange {
  VersionId from, id;
  uint64_t number = 0;
  double closed_unix_s = 0;
  uint64_t bytes = 0;
  uint64_t elements = 0;             // that differ
  std::vector<ChangedPiece> pieces;  // those of a tensor together and in order
  FollowMemory::Share share = {};
};

}  // namespace ballast
