#include "server/stability/spike_score.h"

#include <algorithm>

namespace ballast {

void SpikeScore::Add(bool event, std::optional<uint32_t> spike_age) {
  const auto soon = past_.begin() + kMostLead;
  ++counts_.steps;
  counts_.covered += std::any_of(past_.begin(), soon, [](const Past& p) { return p.event; }) ? 1 : 0;
  if (spike_age) AddSpike(*spike_age);
  if (past_.back().event && !past_.back().settled) ++counts_.false_alarms;
  std::move_backward(past_.begin(), past_.end() - 1, past_.end());
  past_.front() = {.event = event, .settled = spike_age.has_value()};
}

void SpikeScore::AddSpike(uint32_t age) {
  if (age > kMostDelay) {
    for (Past& p : past_) p.settled = true;
    return;
  }
  const auto first = past_.begin() + age;  // the step before the spike's first
  const auto end = first + kMostLead;
  const auto last = std::find_if(first, end, [](const Past& p) { return p.event; });
  if (last == end) {
    ++counts_.misses;
  } else {
    ++counts_.hits;
    ++counts_.leads[static_cast<size_t>(last - first) + 1];
  }
  std::for_each(past_.begin(), end, [](Past& p) { p.settled = true; });
}

}  // namespace ballast
