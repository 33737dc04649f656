// The daemons of a run that is on several, as ClientOptions::server names them. A function; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast {

// "a:7700,b:7700" as its addresses. INVALID_ARGUMENT: one is empty, or is there twice.
absl::StatusOr<std::vector<std::string>> SplitServers(const std::string& server);

}  // namespace ballast
