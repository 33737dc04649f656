// One GET over a plain socket, enough to ask /readyz and to look into /metrics.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ballast::ctl {

struct HttpAnswer {
  int status = 0;
  std::string body;  // of the first 64 MiB
};
// The answer to GET http://address/path. UNAVAILABLE with the reason when there is no HTTP answer, or when nothing more
// of it comes for timeout_s.
absl::StatusOr<HttpAnswer> HttpGet(const std::string& address, const std::string& path, double timeout_s);

}  // namespace ballast::ctl
