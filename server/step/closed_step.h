// A step after it closed, and what its ranks want to be kept with it. Values; thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/stability/spikes.h"
#include "server/step/step_machine.h"

namespace ballast {

// Weights of `not_applied` tensors did not change.
struct ClosedStep {
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason;  // a word
  std::string detail;  // for people
  std::vector<uint32_t> not_applied;
  std::vector<uint32_t> left_out = {};  // ranks
  double grad_norm = 0;                 // before clipping
  double clip_coefficient = 1;
  uint64_t nonfinite_tensors = 0;
  uint64_t rejected_blocks = 0;
  std::vector<SpikeEvent> spikes = {};
};

// A trainer's own state, opaque here, and the step that it belongs to.
struct ClientState {
  uint64_t step = 0;
  std::string bytes;
};

}  // namespace ballast
