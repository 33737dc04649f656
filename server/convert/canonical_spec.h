// The canonical form of a run's spec: defaults filled in, deterministic bytes; and the first field in which two of them
// differ. It is what makes CreateRun idempotent. Pure functions; thread-safe.
#pragma once

#include <optional>
#include <string>

#include "ballast/v1/run.pb.h"

namespace ballast {

// `spec`: one that ToRunSpec accepts, of a daemon with or without storage.
v1::RunSpec Canonical(const v1::RunSpec& spec, bool has_storage = false);
std::string SerializeCanonical(const v1::RunSpec& canonical);

// "tensors[3].dtype is \"bf16\", asked for is \"fp32\""; nullopt when equal.
std::optional<std::string> FirstDifference(const v1::RunSpec& existing, const v1::RunSpec& asked);

}  // namespace ballast
