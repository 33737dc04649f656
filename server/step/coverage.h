// Which elements of the tensors a rank contributes gradients of, and which it receives weights of: chunks, whole or in
// part. Values; thread-compatible.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace ballast {

// Elements [begin, end) of a chunk of `of` elements, counted from the chunk's first.
struct ChunkPart {
  uint32_t begin = 0, end = 0, of = 0;
  auto operator<=>(const ChunkPart&) const = default;
};

// Elements of a run's tensors, at most one piece of each chunk: a bit for each chunk of which there are some, and the
// pieces that are not whole chunks. A set made by the default constructor stands for all elements, and takes no memory.
class ChunkSet {
 public:
  // By tensor, how many chunks come before its first; the last entry is the number of all chunks. A run's sets share
  // it.
  using Starts = std::shared_ptr<const std::vector<uint64_t>>;
  // Of a tensor, at most: a range begins in the middle of one chunk and ends in that of another. So what a set takes
  // does not grow with what a client says of it.
  static constexpr uint64_t kMostParts = 2;
  struct Piece {
    uint64_t chunk = 0;
    ChunkPart part = {};
  };

  ChunkSet() = default;
  // Contains all chunks.
  explicit ChunkSet(Starts starts) : starts_(std::move(starts)), has_(starts_->back(), true) {}
  static constexpr uint64_t Bytes(uint64_t chunks, uint64_t parts = 0) {
    return (chunks + 63) / 64 * 8 + parts * sizeof(Piece);
  }
  static constexpr uint64_t StartsBytes(uint64_t tensors) { return (tensors + 1) * sizeof(uint64_t); }

  // Whether the default constructor made it.
  bool empty() const { return starts_ == nullptr; }
  // Whether it has some of the chunk.
  bool Has(uint32_t tensor, uint64_t chunk) const { return has_[(*starts_)[tensor] + chunk]; }
  // What it has of a chunk that it has in part; none: it has all of it, or nothing.
  std::optional<ChunkPart> PartOf(uint32_t tensor, uint64_t chunk) const {
    return parts_.empty() ? std::nullopt : FindPart((*starts_)[tensor] + chunk);
  }
  // Of the tensor's chunks, those that it has some of.
  uint64_t Count(uint32_t tensor) const {
    return static_cast<uint64_t>(std::count(At((*starts_)[tensor]), At((*starts_)[tensor + 1]), true));
  }
  // Which chunks of the tensor it has some of, and those that it has in part, ascending. Tensors with parts come in
  // ascending order, each once.
  void Assign(uint32_t tensor, const std::vector<bool>& chunks, absl::Span<const Piece> parts = {});
  uint64_t bytes() const { return has_.capacity() / 8 + parts_.capacity() * sizeof(Piece); }

 private:
  std::vector<bool>::const_iterator At(uint64_t flat) const { return has_.begin() + static_cast<std::ptrdiff_t>(flat); }
  std::optional<ChunkPart> FindPart(uint64_t flat) const;

  Starts starts_;
  std::vector<bool> has_;
  std::vector<Piece> parts_;  // by flat chunk, ascending
};
inline bool Contains(const ChunkSet& set, uint32_t tensor, uint64_t chunk) {
  return set.empty() || set.Has(tensor, chunk);
}
// What the set has of a chunk of so many elements, of which it has some.
inline ChunkPart PartIn(const ChunkSet& set, uint32_t tensor, uint64_t chunk, uint64_t elements) {
  const auto n = static_cast<uint32_t>(elements);
  return set.PartOf(tensor, chunk).value_or(ChunkPart{0, n, n});
}
// The first chunk from `from` on, of the tensor's `chunks`, that the set has some of; none: there is none.
inline std::optional<uint64_t> NextIn(const ChunkSet& set, uint32_t tensor, uint64_t from, uint64_t chunks) {
  while (from < chunks && !Contains(set, tensor, from)) ++from;
  return from < chunks ? std::optional<uint64_t>(from) : std::nullopt;
}
// The first elements of the chunk that none of the sets has; `of` is 0 where none has any of it. None: they leave no
// gap.
std::optional<ChunkPart> GapOf(absl::Span<const ChunkSet* const> sets, uint32_t tensor, uint64_t chunk);

struct Coverage {
  ChunkSet contributes, receives;
};

}  // namespace ballast
