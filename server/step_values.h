// The values that all ranks must give alike for a step, as bytes to compare and keep.
//
// Pure functions; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "server/run_spec.h"

namespace ballast {

// The loss scale and the groups' hyperparameters (by group, in the kernel's order), to the bit.
std::string StepContent(double loss_scale, const std::vector<std::vector<double>>& hyper);

// The first field in which two contents of one run differ, with both values: "groups[1].lr is 0.1 and 0.2".
std::string DifferenceOf(const RunSpec& spec, const std::string& a, const std::string& b);

}  // namespace ballast
