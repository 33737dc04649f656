// The step machine's events and effects as words: the language of tests/server/step/scenarios, in which the simulator
// tells of a seed too.
#pragma once

#include <string>

#include "server/step/step_machine.h"

namespace ballast {

std::string Describe(const ChunkId& id);
std::string Describe(const StepEvent& event);    // as a scenario's command
std::string Describe(const StepEffect& effect);  // as its answer
std::string Describe(const AwaitedRank& rank);

}  // namespace ballast
