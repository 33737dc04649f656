// Gives back the rank of a client whose stream cannot say so: its session ended by a rewind, or with the daemon that
// started it, or its connection was lost. Without that the run would wait for a trainer that has left in good order.
// Blocks; thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/cpp/client.h"
#include "client/cpp/transport/connection.h"

namespace ballast {

// With no step open here. Over a stream of the session of `token`, where that lives; else, or where that is empty, of a new
// one, which takes the rank only if it is free. Tries for so long where the daemon is away or busy. Returns the last step that has closed in the
// run; or why the rank is not given back: another process has it, the run is gone, or no daemon answers.
absl::StatusOr<uint64_t> GiveRankBack(Connection& connection, const AttachOptions& options, const std::string& token,
                                      absl::Duration timeout);

}  // namespace ballast
