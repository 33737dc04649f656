#include "server/stability/spike_score.h"

#include <algorithm>

namespace ballast {

void SpikeScore::Add(bool event, bool loss_spike) {
  ++counts_.steps;
  const auto last = std::find_if(past_.begin(), past_.end(), [](const Past& p) { return p.event; });
  counts_.covered += last != past_.end() ? 1 : 0;
  if (loss_spike && last != past_.end()) {
    ++counts_.hits;
    ++counts_.leads[static_cast<size_t>(last - past_.begin()) + 1];
    for (Past& past : past_) past.followed = true;
  } else if (loss_spike) {
    ++counts_.misses;
  }
  if (past_.back().event && !past_.back().followed) ++counts_.false_alarms;
  std::move_backward(past_.begin(), past_.end() - 1, past_.end());
  past_.front() = {.event = event};
}

}  // namespace ballast
