// The bounds of RequestBatch, ResponseBatch and LoadStateRequest.batch: what small messages may go as one
// (proto/PROTOCOL.md, "Batches").
#pragma once

#include <cstddef>

namespace ballast {

inline constexpr int kMostBatchMessages = 1024;
inline constexpr size_t kMostBatchBytes = 256 << 10;
// The largest message that goes into a batch. A larger one gains nothing by it and goes alone.
inline constexpr size_t kMostBatchedBytes = 64 << 10;

// Of SmallGradients or SmallWeights: with its lists one stays below kMostBatchedBytes.
inline constexpr size_t kMostJoinedBytes = 32 << 10;

// Whether one more message might not fit into a batch of so many messages and bytes.
inline bool BatchIsFull(int messages, size_t bytes) {
  return bytes + kMostBatchedBytes > kMostBatchBytes || messages == kMostBatchMessages;
}

}  // namespace ballast
