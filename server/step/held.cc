#include "server/step/held.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// The most bytes that an entry's fields take beside its bitmap.
constexpr uint64_t kEntryBytes = 32;

absl::Status TooLong(uint32_t rank, uint32_t micros, uint32_t tensors, uint64_t most_bytes) {
  return absl::FailedPreconditionError(absl::StrCat(
      "what the daemon has of rank ", rank, "'s gradients, of ", tensors, " tensors in ", micros,
      " micro-batches, takes more than the ", most_bytes,
      " bytes of a message, as this client has to be told of it; resume with a client that knows held_whole "
      "(AttachRequest.features), or attach without a token, with takeover, and make the step anew"));
}

}  // namespace

// A rank begins a micro-batch only when it has delivered all of the one before.
absl::StatusOr<Held> HeldOf(const ReductionTracker& reduction, uint32_t rank, uint32_t tensors, bool knows_whole,
                            uint64_t most_bytes) {
  Held held;
  const uint32_t begun = reduction.micros_begun(rank);
  if (knows_whole && begun > 0) held.whole_micros = begun - 1;
  held.whole_tensors.resize(tensors);
  uint64_t bytes = 0;
  for (uint32_t micro = held.whole_micros; micro < begun; ++micro) {
    for (uint32_t i = 0; i < tensors; ++i) {
      const uint64_t count = reduction.count(rank, micro, i);
      if (count > 0 && knows_whole && count == reduction.covered(rank, i)) {
        held.whole_tensors[i] = true;
      } else if (count > 0) {
        std::vector<bool> chunks = reduction.Delivered(rank, micro, i);
        bytes += kEntryBytes + chunks.size() / 8;
        if (!knows_whole && bytes > most_bytes) return TooLong(rank, begun, tensors, most_bytes);
        held.chunks.push_back({.micro = micro, .tensor = i, .chunks = std::move(chunks)});
      }
    }
  }
  return held;
}

}  // namespace ballast
