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
  // As little as a step may have that updates tensors as they complete: a pool has room for the largest of its tensors,
  // and a window for one chunk.
  bool least = false;
  bool sharded = false;             // always, and not only by chance
  std::ostream* listing = nullptr;  // every event with its effects
};

struct SimulatorReport {
  std::string violation;  // with the seed, the event's number and the last events; empty: none
  uint64_t events = 0;
  Counts counts = {};
};

SimulatorReport Simulate(const SimulatorOptions& options);

// The run that the options stand for; `random` begins with their seed.
RunShape DrawRun(const SimulatorOptions& options, Random* random, uint32_t* world);

}  // namespace ballast::sim
