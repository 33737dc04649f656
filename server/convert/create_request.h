// What the registry is asked to create, of a message, or of a checkpoint's spec.json. Pure functions; thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"

#include "ballast/v1/run.pb.h"
#include "server/config/config.h"
#include "server/run/run_registry.h"

namespace ballast {

// As ToRunSpec (server/convert/convert.h).
absl::StatusOr<RunRegistry::CreateRequest> ToCreateRequest(const v1::RunSpec& spec, const Config::Limits& limits,
                                                           bool has_storage);
// Of a canonical spec with this hash. DATA_LOSS names `file`.
absl::StatusOr<RunRegistry::CreateRequest> ToCreateRequest(const std::string& spec_json, const std::string& sha256,
                                                           const std::string& file, const Config::Limits& limits);

}  // namespace ballast
