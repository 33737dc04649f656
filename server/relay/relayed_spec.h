// The spec of a run that another daemon has, as far as its versions go, and what the run takes here. Pure functions.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "ballast/v1/admin.pb.h"
#include "server/config/config.h"
#include "server/plan/plan.h"
#include "server/spec/run_spec.h"

namespace ballast {

// FAILED_PRECONDITION: this daemon cannot read it, or its chunks are none that a daemon may have.
absl::StatusOr<RunSpec> ToRelayedSpec(const v1::GetRunResponse& run, const Config::Limits& limits);
// Whether versions of both are the same bytes.
bool ServeTheSame(const RunSpec& a, const RunSpec& b);
// On the host: its versions, and a message under way to each reader; nothing else.
Plan RelayedPlan(const RunSpec& spec, uint32_t readers);

}  // namespace ballast
