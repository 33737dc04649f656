// Deletes a run on one of the daemons that it is on. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

#include "ballast/v1/admin.pb.h"
#include "client/cpp/transport/connection.h"

namespace ballast {

// For a caller that deletes it on so many. FAILED_PRECONDITION where the run is on more, unless `force`; a daemon that is
// older than that question deletes its part all the same.
absl::StatusOr<v1::DeleteRunResponse> DeletePart(Connection& connection, const std::string& run_id, bool force,
                                                 bool keep_checkpoints, uint32_t daemons);

}  // namespace ballast
