// The calls of v1::FollowService about versions that have names, made again as Retry says. Functions; thread-safe.
//
// UNIMPLEMENTED: the daemon is older than names. Other errors are the daemon's: v1::FollowService says which.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "ballast/v1/follow.pb.h"
#include "client/cpp/transport/connection.h"

namespace ballast {

absl::StatusOr<v1::TagVersionResponse> TagVersion(Connection& connection, const v1::TagVersionRequest& request);
absl::Status UntagVersion(Connection& connection, const std::string& run_id, const std::string& name);
absl::StatusOr<v1::ListVersionsResponse> ListVersions(Connection& connection, const std::string& run_id);
// OK: the run has a version of this name that can be read. NOT_FOUND names those that it has.
absl::Status CheckTag(Connection& connection, const std::string& run_id, const std::string& name);

}  // namespace ballast
