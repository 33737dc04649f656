// Ranks, connections, a device and a clock around a real step machine, all drawn from one seed: the same seed gives the
// same run. Ranks keep to the protocol; connections break, processes die, come back, stay away or are replaced, clocks
// jump. The checker looks at every event.
//
// Faults come only in the first part of a run. In the second part every step must close; otherwise it is a deadlock.
#pragma once

#include <iosfwd>
#include <string>

#include "tests/server/step/step_simulator_mutants.h"
#include "tests/server/step/step_simulator_rank.h"

namespace ballast::sim {

struct SimulatorOptions {
  uint64_t seed = 0;
  MakeMachine make = MakePlain;
  std::ostream* listing = nullptr;  // every event with its effects
};

struct SimulatorReport {
  std::string violation;  // with the seed, the event's number and the last events; empty: none
  uint64_t events = 0;
  Counts counts = {};
};

SimulatorReport Simulate(const SimulatorOptions& options);

// The run that a seed stands for.
RunShape DrawRun(Random* random, uint32_t* world);

}  // namespace ballast::sim
