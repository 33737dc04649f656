// Which of a rank's contributions to the open step have arrived; a client that resumes is told so (ChunksHeld).
//
// Pure; thread-safe as far as the ReductionTracker is.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "server/step/reduction_tracker.h"

namespace ballast {

struct HeldChunks {
  uint32_t micro = 0;
  uint32_t tensor = 0;
  std::vector<bool> chunks;
};
struct Held {
  uint32_t whole_micros = 0;             // so many micro-batches, from 0 on, are held whole
  std::vector<bool> whole_tensors = {};  // in the next one, all that the rank contributes to these tensors is held
  std::vector<HeldChunks> chunks = {};   // and these chunks besides
};

// The longest message that a client takes.
inline constexpr uint64_t kMostHeldBytes = uint64_t{64} << 20;

// knows_whole: the client knows the field held_whole. A client that does not is told each chunk of each micro-batch;
// FAILED_PRECONDITION, if that takes more than most_bytes.
absl::StatusOr<Held> HeldOf(const ReductionTracker& reduction, uint32_t rank, uint32_t tensors, bool knows_whole,
                            uint64_t most_bytes = kMostHeldBytes);

}  // namespace ballast
