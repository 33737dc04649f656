// A rank's part of a tensor. A value.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ballast {

// Elements [begin, end) of a tensor, row-major. The rank receives the weights of them, and sends the gradients where it
// contributes: of ranks that hold the same elements, as replicas do, one does. begin == end: it holds nothing of the
// tensor.
struct Shard {
  uint64_t begin = 0, end = 0;
  bool contributes = true;
};

// By tensor; none: all of it, with its gradients. An empty list stands for whole tensors.
using Shards = std::vector<std::optional<Shard>>;

// The first element of the tensor that is held: where memory of the shard begins.
inline uint64_t FirstHeld(const Shards& shards, uint32_t tensor) {
  return tensor < shards.size() && shards[tensor] ? shards[tensor]->begin : 0;
}

}  // namespace ballast
