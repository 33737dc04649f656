// What of the tensors a rank contributes gradients of, and receives weights of.
#pragma once

#include <cstdint>
#include <vector>

namespace ballast {

// By tensor, by chunk. Empty, or empty of a tensor: all.
using ChunkSet = std::vector<std::vector<bool>>;
inline bool Contains(const ChunkSet& set, uint32_t tensor, uint64_t chunk) {
  return set.empty() || set[tensor].empty() || set[tensor][chunk];
}

struct Coverage {
  ChunkSet contributes, receives;
};

}  // namespace ballast
