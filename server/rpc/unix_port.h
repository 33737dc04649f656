// A Unix socket as the gRPC port: gRPC takes the path from whoever listens there, and does not say why it cannot have it.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace ballast {

// Before gRPC listens at unix:/PATH: whether it can. Removes the socket of a daemon that is gone. UNAVAILABLE names what
// stands in the way: a daemon that answers there, a file, the system's word for it.
absl::Status ReadyUnixPort(const std::string& listen);

}  // namespace ballast
