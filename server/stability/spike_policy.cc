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
  if (due && skips_ < settings_.most_skips && (skips_ > 0 || rest_ == 0)) {
    ++skips_;
    return true;
  }
  if (skips_ > 0) {
    rest_ = settings_.cooldown_steps;
  } else if (rest_ > 0) {
    --rest_;
  }
  skips_ = 0;
  return false;
}

SpikePolicy::Answer SpikePolicy::Decide(const std::vector<SpikeEvent>& found) {
  if (settings_.action != SpikeAction::kRewind) return Answer::kGoOn;
  if (rest_ > 0) {
    --rest_;
    return Answer::kGoOn;
  }
  if (ActedOn(found) == nullptr) return Answer::kGoOn;
  if (rewinds_ == settings_.most_rewinds) return Answer::kStop;
  ++rewinds_;
  rest_ = settings_.cooldown_steps;
  return Answer::kRewind;
}

}  // namespace ballast
