// Which chunks of the tensors a rank contributes gradients of, and which it receives weights of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace ballast {

// A set of chunks of a run's tensors, one bit each. A set made by the default constructor stands for all chunks, and
// takes no memory.
class ChunkSet {
 public:
  // By tensor, how many chunks come before its first; the last entry is the number of all chunks. A run's sets share
  // it.
  using Starts = std::shared_ptr<const std::vector<uint64_t>>;

  ChunkSet() = default;
  // Contains all chunks.
  explicit ChunkSet(Starts starts) : starts_(std::move(starts)), has_(starts_->back(), true) {}
  static constexpr uint64_t Bytes(uint64_t chunks) { return (chunks + 63) / 64 * 8; }
  static constexpr uint64_t StartsBytes(uint64_t tensors) { return (tensors + 1) * sizeof(uint64_t); }

  // Whether the default constructor made it.
  bool empty() const { return starts_ == nullptr; }
  bool Has(uint32_t tensor, uint64_t chunk) const { return has_[(*starts_)[tensor] + chunk]; }
  uint64_t Count(uint32_t tensor) const {
    return static_cast<uint64_t>(std::count(At((*starts_)[tensor]), At((*starts_)[tensor + 1]), true));
  }
  void Assign(uint32_t tensor, const std::vector<bool>& chunks) {
    std::copy(chunks.begin(), chunks.end(), has_.begin() + static_cast<std::ptrdiff_t>((*starts_)[tensor]));
  }
  uint64_t bytes() const { return has_.capacity() / 8; }

 private:
  std::vector<bool>::const_iterator At(uint64_t flat) const { return has_.begin() + static_cast<std::ptrdiff_t>(flat); }

  Starts starts_;
  std::vector<bool> has_;
};
inline bool Contains(const ChunkSet& set, uint32_t tensor, uint64_t chunk) {
  return set.empty() || set.Has(tensor, chunk);
}

struct Coverage {
  ChunkSet contributes, receives;
};

}  // namespace ballast
