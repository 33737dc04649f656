// The machine as the simulator drives it, and machines with a planted fault: what the simulator does not notice in
// them, it would not notice in the real one.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/step/step_machine.h"

namespace ballast::sim {

class MachineUnderTest {
 public:
  explicit MachineUnderTest(StepMachineOptions options) : machine_(std::move(options)) {}
  virtual ~MachineUnderTest() = default;

  virtual StepEffects Handle(const StepEvent& event, double now_s) { return machine_.Handle(event, now_s); }
  virtual std::optional<ChunkId> Offer(uint32_t rank, bool short_of_credit) {
    return machine_.Offer(rank, short_of_credit);
  }
  const StepMachine& machine() const { return machine_; }
  void GoOnFrom(StepMachine::Past past) { machine_.GoOnFrom(std::move(past)); }

 private:
  StepMachine machine_;
};

using MakeMachine = std::function<std::unique_ptr<MachineUnderTest>(StepMachineOptions)>;

std::unique_ptr<MachineUnderTest> MakePlain(StepMachineOptions options);

// Leaves those effects out.
template <class Which>
void EraseIf(StepEffects* effects, Which which) {
  effects->erase(std::remove_if(effects->begin(), effects->end(), which), effects->end());
}

struct Mutant {
  std::string name;
  MakeMachine make;
};
std::vector<Mutant> Mutants();

}  // namespace ballast::sim
