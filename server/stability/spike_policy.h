// What a run does about its detector's events: warn, skip the step, or go back to a snapshot. There is one verdict for
// all ranks. The policy rests after an action, and does not act for ever.
//
// A rewind does not change the policy: otherwise the same spike would cause rewinds for ever. Thread-compatible.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "server/stability/spikes.h"

namespace ballast {

class SpikePolicy {
 public:
  explicit SpikePolicy(SpikeSettings settings) : settings_(std::move(settings)) {}

  // Whether to skip a step, decided before it is applied from what was foreseen. To be called for each step once;
  // always false unless the action is kSkip.
  bool Skips(const std::vector<SpikeEvent>& foreseen);

  enum class Answer { kGoOn, kRewind, kStop };
  // What to do after a step has closed, from what was found. To be called for each step once; always kGoOn unless the
  // action is kRewind. kStop: the run has gone back as often as it may.
  Answer Decide(const std::vector<SpikeEvent>& found);

  // The first event that the policy acts on; nullptr: none.
  const SpikeEvent* ActedOn(const std::vector<SpikeEvent>& events) const;
  uint32_t rewinds() const { return state_.rewinds; }

  // What it has done, for a checkpoint.
  struct State {
    uint32_t rest = 0;     // steps to come without an action
    uint32_t skips = 0;    // in a row, until now
    uint32_t rewinds = 0;  // in all
  };
  const State& state() const { return state_; }
  void GoOnFrom(const State& state) { state_ = state; }

 private:
  SpikeSettings settings_;
  State state_;
};

}  // namespace ballast
