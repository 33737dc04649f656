// Makes sets of chunks from literals.
#pragma once

#include <memory>
#include <vector>

#include "server/step/coverage.h"

namespace ballast::testing {

// The set of the chunks that are true, by tensor and chunk; an empty list stands for all chunks. `parts`: by tensor,
// or none.
inline ChunkSet ChunkSetOf(const std::vector<std::vector<bool>>& by_tensor,
                           const std::vector<std::vector<ChunkSet::Piece>>& parts = {}) {
  if (by_tensor.empty()) return {};
  auto starts = std::make_shared<std::vector<uint64_t>>(1);
  for (const std::vector<bool>& chunks : by_tensor) starts->push_back(starts->back() + chunks.size());
  ChunkSet set(std::move(starts));
  for (uint32_t i = 0; i < by_tensor.size(); ++i) {
    set.Assign(i, by_tensor[i], parts.empty() ? std::vector<ChunkSet::Piece>() : parts[i]);
  }
  return set;
}

// The same chunks, each of them whole. `chunks`: by tensor, how many it has.
inline ChunkSet WithoutParts(const ChunkSet& set, const std::vector<uint64_t>& chunks) {
  std::vector<std::vector<bool>> whole;
  for (const uint64_t of_tensor : chunks) {
    const auto tensor = static_cast<uint32_t>(whole.size());
    whole.emplace_back();
    for (uint64_t c = 0; c < of_tensor; ++c) whole[tensor].push_back(set.Has(tensor, c));
  }
  return ChunkSetOf(whole);
}

}  // namespace ballast::testing
