// What of the open step a rank's contributions are in, as a client that resumes is told (ChunksHeld).
//
// Pure; thread-safe as far as the Reduction is.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "server/step/reduction.h"

namespace ballast {

struct HeldChunks {
  uint32_t micro = 0;
  uint32_t tensor = 0;
  std::vector<bool> chunks;
};
struct Held {
  uint32_t whole_micros = 0;             // everything of those before is held
  std::vector<bool> whole_tensors = {};  // and of the next one all that the rank contributes to these
  std::vector<HeldChunks> chunks = {};   // besides, where there are any
};

// Of a message that a client takes, at most.
inline constexpr uint64_t kMostHeldBytes = uint64_t{64} << 20;

// knows_whole: the client knows held_whole. To one that does not, each chunk of each micro-batch is told, and what
// takes more than most_bytes is refused with FAILED_PRECONDITION.
absl::StatusOr<Held> HeldOf(const Reduction& reduction, uint32_t rank, uint32_t tensors, bool knows_whole,
                            uint64_t most_bytes = kMostHeldBytes);

}  // namespace ballast
