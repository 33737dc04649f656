// What a message takes of the daemon's memory, which its bytes do not say: an empty message in it has two bytes on the
// wire and a hundred here, and a field that this daemon does not know is kept at twenty times its bytes. gRPC makes a
// message before anybody can look at it; from then on it is bounded here. Thread-safe.
#pragma once

#include <google/protobuf/message.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace ballast {

// In bytes. RESOURCE_EXHAUSTED: more than `most`.
absl::StatusOr<uint64_t> MemoryOf(const google::protobuf::Message& request, uint64_t most);
// Of a call about a run, whose request is kept until it ends. RESOURCE_EXHAUSTED: it takes more than can be said of each tensor
// and each chunk.
absl::Status CheckRequestMemory(const google::protobuf::Message& request, uint64_t tensors, uint64_t chunks);

// A stream's message is kept until the next one comes: what it had beyond kMostKeptBytes, its long fields having been
// taken, is let go. bytes: that it had on the wire.
constexpr size_t kMostKeptBytes = 64 << 10;
template <class Message>
void LetGoOfLarge(size_t bytes, Message* message) {
  if (bytes > kMostKeptBytes && message->ByteSizeLong() > kMostKeptBytes) *message = Message();
}

}  // namespace ballast
