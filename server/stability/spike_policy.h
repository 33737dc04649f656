// What a run does about what its detector found: warn, skip the step, or go back to a snapshot. One verdict for all
// ranks; it rests after an action, and does not act for ever.
//
// A rewind leaves it alone: else the same spike would be rewound from for ever. Thread-compatible.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "server/stability/spikes.h"

namespace ballast {

class SpikePolicy {
 public:
  explicit SpikePolicy(SpikeSettings settings) : settings_(std::move(settings)) {}

  // Before a step is applied, of what was foreseen: whether to skip it. Each step once; false but of kSkip.
  bool Skips(const std::vector<SpikeEvent>& foreseen);

  enum class Answer { kGoOn, kRewind, kStop };
  // When a step is closed, of what was found. Each step once; kGoOn but of kRewind. kStop: it has gone back as often as
  // it may.
  Answer Decide(const std::vector<SpikeEvent>& found);

  // The first that it acts on; nullptr: none.
  const SpikeEvent* ActedOn(const std::vector<SpikeEvent>& events) const;
  uint32_t rewinds() const { return rewinds_; }

 private:
  SpikeSettings settings_;
  uint32_t rest_ = 0;   // steps to come without an action
  uint32_t skips_ = 0;  // in a row, until now
  uint32_t rewinds_ = 0;
};

}  // namespace ballast
