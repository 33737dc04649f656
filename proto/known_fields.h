// What a later version has written, and this one would pass over in silence.
#pragma once

#include <google/protobuf/message.h>

#include <optional>
#include <string>

#include "absl/status/status.h"

namespace ballast {

// The first field of `message`, or of one within it, that this version has no name for: spec.tensors[3].24. None: it
// knows them all.
std::optional<std::string> UnknownFieldOf(const google::protobuf::Message& message);

// INVALID_ARGUMENT names that field of a request, and what to do.
absl::Status CheckKnownFields(const google::protobuf::Message& request);

}  // namespace ballast
