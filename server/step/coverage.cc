#include "server/step/coverage.h"

namespace ballast {

void ChunkSet::Assign(uint32_t tensor, const std::vector<bool>& chunks, absl::Span<const Piece> parts) {
  const uint64_t first = (*starts_)[tensor];
  std::copy(chunks.begin(), chunks.end(), has_.begin() + static_cast<std::ptrdiff_t>(first));
  for (const Piece& piece : parts) parts_.push_back({first + piece.chunk, piece.part});
}

std::optional<ChunkPart> ChunkSet::FindPart(uint64_t flat) const {
  const auto found = std::lower_bound(parts_.begin(), parts_.end(), flat,
                                      [](const Piece& piece, uint64_t chunk) { return piece.chunk < chunk; });
  if (found == parts_.end() || found->chunk != flat) return std::nullopt;
  return found->part;
}

std::optional<ChunkPart> GapOf(absl::Span<const ChunkSet* const> sets, uint32_t tensor, uint64_t chunk) {
  std::vector<ChunkPart> parts;
  for (const ChunkSet* set : sets) {
    if (!Contains(*set, tensor, chunk)) continue;
    const auto part = set->PartOf(tensor, chunk);
    if (!part) return std::nullopt;
    parts.push_back(*part);
  }
  if (parts.empty()) return ChunkPart{};
  std::sort(parts.begin(), parts.end());
  const uint32_t of = parts[0].of;
  uint32_t covered = 0;
  for (const ChunkPart& part : parts) {
    if (part.begin > covered) return ChunkPart{covered, part.begin, of};
    covered = std::max(covered, part.end);
  }
  return covered < of ? std::optional(ChunkPart{covered, of, of}) : std::nullopt;
}

}  // namespace ballast
