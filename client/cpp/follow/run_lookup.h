// Finds the run that a reader is to follow, which its trainers may not have begun yet.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "ballast/v1/admin.pb.h"
#include "client/cpp/transport/connection.h"

namespace ballast {

// The run as the daemon has it now. With `wait`: when it is there and has weights, if that is within so much; until then also a
// daemon that is lost, or a relay whose upstream is, may come back. Blocks. NOT_FOUND, FAILED_PRECONDITION: there was no such
// run, or it had no weights; CANCELLED: the caller was interrupted.
absl::StatusOr<v1::GetRunResponse> LookUpRun(Connection& connection, const std::string& run_id, absl::Duration wait);

}  // namespace ballast
