// How well a predictor's events foretold loss spikes: a spike is hit when an event lies 1 to 8 steps before its first
// step. A predictor that fires all the time hits every spike, so its hits are compared with chance: the share of steps
// that lie 1 to 8 steps after an event.
//
// A spike is known to be one up to nine steps after its first (server/stability/loss_watch.h), so the score looks back
// so far. An event of the spike's own steps neither foretells it nor is a false alarm.
//
// A copyable value; thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace ballast {

class SpikeScore {
 public:
  static constexpr uint32_t kMostLead = 8;   // steps
  static constexpr uint32_t kMostDelay = 9;  // steps from a spike's first to the one that makes it known

  struct Counts {
    uint64_t hits = 0, misses = 0;  // loss spikes
    uint64_t false_alarms = 0;      // events that no loss spike followed
    uint64_t steps = 0, covered = 0;
    std::array<uint64_t, kMostLead + 1> leads = {};  // hits by steps from the last event to the spike
    double chance() const { return steps == 0 ? 0 : static_cast<double>(covered) / static_cast<double>(steps); }
  };

  // What one of the last steps was.
  struct Past {
    bool event = false, settled = false;  // and a loss spike has followed, or was going on
  };
  using PastSteps = std::array<Past, kMostLead + kMostDelay>;  // [0]: the step before

  SpikeScore() = default;
  // One that goes on from another's past() and counts().
  SpikeScore(const PastSteps& past, const Counts& counts) : past_(past), counts_(counts) {}
  const PastSteps& past() const { return past_; }

  // To be called for each step once, in order. spike_age: a loss spike became known at this step, whose first step lies
  // so many before it; where that is more than kMostDelay, as with a loss that is told now and then, it is neither hit nor
  // missed. event: one that is not of the steps after that, while the spike goes on.
  void Add(bool event, std::optional<uint32_t> spike_age);
  const Counts& counts() const { return counts_; }

 private:
  void AddSpike(uint32_t age);

  PastSteps past_ = {};
  Counts counts_;
};

}  // namespace ballast
