// One GET over a plain socket, enough to ask /readyz.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ballast::ctl {

// The status code of GET http://address/path. UNAVAILABLE with the reason when there is no HTTP answer in timeout_s.
absl::StatusOr<int> HttpStatus(const std::string& address, const std::string& path, double timeout_s);

}  // namespace ballast::ctl
