// How the simulated run goes back, and what must hold of the machine then.
#include <utility>

#include "tests/server/step/step_simulator_world.h"

namespace ballast::sim {

// The effects are seen afterwards: sessions and the open step are gone by them.
void StepChecker::Note(const event::Rewind& e) {
  if (refused_) return;
  for (LiveSlab& live : slabs_) live.abandoned = live.abandoned || live.updating;
  const auto after = versions_after_.find(e.to_step);
  version_ = after != versions_after_.end() ? after->second : std::vector<uint64_t>(tensors_.size());
  applied_ = version_;
}

void StepChecker::CheckRewind(const StepMachine& machine) {
  const bool rewound = std::holds_alternative<event::Rewind>(*event_) && !refused_;
  if (rewound) {
    if (open_) Fail("the step that was open outlives a rewind");
    for (const Rank& rank : ranks_) {
      if (rank.session) Fail("a session outlives a rewind");
    }
    if (machine.generation() <= generation_) Fail("a rewind raised no generation");
    step_ = std::get<event::Rewind>(*event_).to_step + 1;
  }
  generation_ = machine.generation();
}

void StepChecker::StartFrom(uint64_t closed_step, uint64_t generation, const StepChecker& of) {
  versions_after_ = of.versions_after_;
  versions_after_.erase(versions_after_.upper_bound(closed_step), versions_after_.end());
  if (const auto after = versions_after_.find(closed_step); after != versions_after_.end()) version_ = after->second;
  applied_ = version_;
  step_ = closed_step + 1;
  generation_ = generation;
}

void Simulator::Rewind() {
  const StepEffects effects = Handle(event::Rewind{.to_step = Below(&timeline_.random, machine().step())});
  if (!effects.empty() && std::holds_alternative<effect::Reject>(effects.front())) return;
  Count(Kind::kRewind);
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
}

}  // namespace ballast::sim
