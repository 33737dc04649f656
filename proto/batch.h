// The bounds of RequestBatch, ResponseBatch and LoadStateRequest.batch: what small messages may go as one
// (proto/PROTOCOL.md, "Batches").
#pragma once

#include <cstddef>

namespace ballast {

inline constexpr int kMostBatchMessages = 1024;
inline constexpr size_t kMostBatchBytes = 256 << 10;
// Of a message in a batch. Larger ones gain nothing from company.
inline constexpr size_t kMostBatchedBytes = 64 << 10;

// Of a batch of so many messages, whether another might not fit.
inline bool BatchIsFull(int messages, size_t bytes) {
  return bytes + kMostBatchedBytes > kMostBatchBytes || messages == kMostBatchMessages;
}

}  // namespace ballast
