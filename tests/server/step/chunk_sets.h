// Makes sets of chunks from literals.
#pragma once

#include <memory>
#include <vector>

#include "server/step/coverage.h"

namespace ballast::testing {

// The set of the chunks that are true, by tensor and chunk; an empty list stands for all chunks.
inline ChunkSet ChunkSetOf(const std::vector<std::vector<bool>>& by_tensor) {
  if (by_tensor.empty()) return {};
  auto starts = std::make_shared<std::vector<uint64_t>>(1);
  for (const std::vector<bool>& chunks : by_tensor) starts->push_back(starts->back() + chunks.size());
  ChunkSet set(std::move(starts));
  for (uint32_t i = 0; i < by_tensor.size(); ++i) set.Assign(i, by_tensor[i]);
  return set;
}

}  // namespace ballast::testing
