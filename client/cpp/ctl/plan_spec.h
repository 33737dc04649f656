// The spec that `ballastctl plan` asks about, from its flags.
#pragma once

#include "absl/status/statusor.h"

#include "ballast/v1/run.pb.h"
#include "client/cpp/ctl/command.h"

namespace ballast::ctl {

std::vector<Flag> PlanFlags();
// INVALID_ARGUMENT: the flags are wrong.
absl::StatusOr<v1::RunSpec> PlanSpec(const Invocation& invocation);

}  // namespace ballast::ctl
