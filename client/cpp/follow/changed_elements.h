// Which elements of a run's tensors have come of a version: a bit for each, until the next one's come. Thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

#include "ballast/v1/follow.pb.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

class ChangedElements {
 public:
  // None. The table outlives it.
  explicit ChangedElements(const TensorTable& tensors);

  // What the chunk has, one that FollowedWeights has applied. With scales that is all of it: what an element is depends on
  // its scale, too.
  void Add(const v1::ChangedChunk& chunk);
  // The version is whole: what comes is of the next one.
  void EndVersion();
  uint64_t Count(uint32_t tensor) const;
  // Writes the places of as many elements in the tensor, ascending.
  void Places(uint32_t tensor, int64_t* places) const;

 private:
  void Clear() { bits_.assign(bits_.size(), 0); }

  const TensorTable& tensors_;
  std::vector<uint64_t> begins_;  // by tensor, and the end: its first word
  std::vector<uint64_t> bits_;
  bool ended_ = false;  // and nothing has come since
};

}  // namespace ballast
