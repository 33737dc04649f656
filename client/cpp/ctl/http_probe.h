// One GET over a plain socket, enough to ask /readyz and to look into /metrics.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ballast::ctl {

struct HttpAnswer {
  int status = 0;
  std::string body;  // of the first 64 MiB
};
// Of GET http://address/path. UNAVAILABLE with the reason when there is no HTTP answer, or timeout_s passes without
// more of it.
absl::StatusOr<HttpAnswer> HttpGet(const std::string& address, const std::string& path, double timeout_s);

}  // namespace ballast::ctl
