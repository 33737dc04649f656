// Time as the simulated daemon sees it, and whom a step that waits is held up by.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "tests/server/step/step_simulator_world.h"

namespace ballast::sim {

bool StepChecker::device_busy() const {
  return BeingRead() || std::any_of(slabs_.begin(), slabs_.end(), [](const LiveSlab& l) { return l.updating; });
}

void Simulator::Tick() {
  ticked_s_ = timeline_.now_s();
  const StepMachine& machine = machine_->machine();
  const bool times = shape_.machine.step_timeout_s > 0 && machine.step_open();
  const double most_s = shape_.machine.counted_tick_s;
  const double seen_s = std::min(most_s, clock_s() - std::max(seen_at_s_, opened_s_));
  seen_at_s_ = clock_s();
  std::vector<bool> idle;
  std::vector<double> before;
  for (uint32_t rank = 0; times && rank < machine.world(); ++rank) {
    idle.push_back(WaitsForOthers(rank));
    before.push_back(machine.awaited_s(rank));
    if (!idle.back()) could_s_[rank] += seen_s;
  }
  const uint64_t step = machine.step();
  Handle(event::Tick{});
  if (!times || !machine.step_open() || machine.step() != step) return;
  bool any = checker_->device_busy();
  for (uint32_t rank = 0; rank < machine.world(); ++rank) {
    const double counted_s = machine.awaited_s(rank) - before[rank];
    any = any || counted_s > 0;
    if (counted_s > 0 && idle[rank]) return Fail(absl::StrCat("blames rank ", rank, ", which waits for others"));
    if (counted_s > most_s + 1e-6) return Fail(absl::StrCat("counts ", counted_s, " s that nobody saw"));
    const bool late = counted_s > 0 && machine.awaited_s(rank) >= shape_.machine.step_timeout_s;
    if (late && !machine.reduction().left_out(rank)) return Fail(absl::StrCat("still waits for rank ", rank));
  }
  if (!any && seen_s > 0) Fail("the step waits, and for nobody");
}

// Whether the rank's process has nothing to do until the daemon says more.
bool Simulator::WaitsForOthers(uint32_t rank) const {
  const Place& place = places_[rank];
  if (place.client == nullptr || place.epoch == 0 || place.open_epoch != place.epoch) return false;
  if (!place.parked.empty()) return true;
  return place.up_s < timeline_.now_s() && place.down_s < timeline_.now_s() && !place.client->computing() &&
         place.client->step() == machine().step();
}

// A step closed for a rank's sake: there is one that could have sent for as long.
void Simulator::CheckOverdue() {
  Count(Kind::kOverdue);
  const double timeout_s = shape_.machine.step_timeout_s;
  const auto late = [&](double could_s) { return could_s > timeout_s - 1e-6; };
  if (std::none_of(could_s_.begin(), could_s_.end(), late)) Fail("overdue, though no rank could have sent for so long");
}

}  // namespace ballast::sim
