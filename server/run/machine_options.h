// What a run's step machine is told of the run. A pure function; thread-safe.
#pragma once

#include "server/plan/plan.h"
#include "server/spec/run_spec.h"
#include "server/step/step_machine.h"

namespace ballast {

StepMachineOptions MachineOptions(const RunSpec& spec, const Plan& plan);

}  // namespace ballast
