#include "server/stability/spike_policy.h"

#include <algorithm>

namespace ballast {

const SpikeEvent* SpikePolicy::ActedOn(const std::vector<SpikeEvent>& events) const {
  const auto found = std::find_if(events.begin(), events.end(), [this](const SpikeEvent& e) {
    return settings_.acts_on[static_cast<size_t>(e.kind)];
  });
  return found == events.end() ? nullptr : &*found;
}

bool SpikePolicy::Skips(const std::vector<SpikeEvent>& foreseen) {
  if (settings_.action != SpikeAction::kSkip) return false;
  const bool due = ActedOn(foreseen) != nullptr;
  // The first skip needs rest before it; those that follow at once are the same action.
  if (due && state_.skips < settings_.most_skips && (state_.skips > 0 || state_.rest == 0)) {
    ++state_.skips;
    return true;
  }
  if (state_.skips > 0) {
    state_.rest = settings_.cooldown_steps;
  } else if (state_.rest > 0) {
    --state_.rest;
  }
  state_.skips = 0;
  return false;
}

SpikePolicy::Answer SpikePolicy::Decide(const std::vector<SpikeEvent>& found) {
  if (settings_.action != SpikeAction::kRewind) return Answer::kGoOn;
  if (state_.rest > 0) {
    --state_.rest;
    return Answer::kGoOn;
  }
  if (ActedOn(found) == nullptr) return Answer::kGoOn;
  if (state_.rewinds == settings_.most_rewinds) return Answer::kStop;
  ++state_.rewinds;
  state_.rest = settings_.cooldown_steps;
  return Answer::kRewind;
}

}  // namespace ballast
