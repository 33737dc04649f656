// One GET, enough to ask /readyz and to look into /metrics.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ballast::ctl {

struct HttpAnswer {
  int status = 0;
  std::string body;  // of the first 64 MiB
};
// The answer to GET http://address/path. UNAVAILABLE with the reason when there is no HTTP answer, or when nothing more
// of it comes for timeout_s. authorities: https, with a certificate that one of these (PEM) signed; empty: http.
absl::StatusOr<HttpAnswer> HttpGet(const std::string& address, const std::string& path, double timeout_s,
                                   const std::string& authorities = "");

}  // namespace ballast::ctl
