// The HTTP port for machines and people that watch: the live page at /, the runbook, the JSON it polls under /api/v1/, /metrics,
// /livez, /readyz, and a list of these at /help. It changes nothing and shows no secrets; GET and HEAD only. It may speak
// TLS, and ask for a token.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/tls/certificate_keeper.h"

namespace ballast {

struct OpsResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::string content_policy = "default-src 'none'";  // of a browser that shows it
};

// What the port shows. Called by the server's threads, several at once; must not block.
struct OpsContent {
  std::function<std::string()> metrics;  // text exposition 0.0.4
  std::function<absl::Status()> live;    // OK, or what does not answer
  std::function<absl::Status()> ready;   // OK, or why not
  // /api/v1/PATH?QUERY, as server/ops/ops_api.h lists them.
  std::function<OpsResponse(const std::string& path, const std::string& query)> api;
};

// How the port is protected.
struct OpsSecurity {
  const CertificateKeeper* certificates = nullptr;  // HTTPS with these, which outlive the server; none: HTTP
  std::string token;                                // as in AnswerOps
};

// Each connection has one of kThreads threads, so that silent connections do not keep /livez and /readyz waiting. The
// page and its JSON are answered for kViewers at a time, and /metrics for kScrapers, so that no number of viewers keeps
// Prometheus waiting. kWaiting more of each kind wait; the next gets a 503. A client that is silent for 2 s while it
// asks, or reads nothing for 2 s while it is answered, is cut off; so is one that has not read its answer after 10 s.
// Thread-safe.
class OpsHttp {
 public:
  static constexpr int kThreads = 64, kQueue = 16;  // connections that have a thread, and that wait for one
  static constexpr int kViewers = 3, kScrapers = 2, kWaiting = 16;

  // listen: "off", or HOST:PORT where HOST is an IPv4 address or localhost and port 0 picks a free one. UNAVAILABLE
  // names the address that cannot be had, and the fix.
  // `hosts`: names beside MachineNames() that a request's Host may have, as in AnswerOps.
  static absl::StatusOr<std::unique_ptr<OpsHttp>> Start(const std::string& listen, OpsContent content,
                                                        const std::vector<std::string>& hosts = {},
                                                        OpsSecurity security = {});
  // Waits for the requests being answered.
  virtual ~OpsHttp() = default;

  // HOST:PORT, the real port; empty when off.
  virtual std::string address() const = 0;
};

// The part of the server that needs no sockets.
struct OpsRequest {
  std::string method;
  std::string path;                // without the query
  std::string query = {};          // without the question mark
  std::string host;                // the header; empty: there was none
  std::string authorization = {};  // likewise
};
// A Host header must be an IP address, localhost or one of `names`, where "*" allows any. Anything else is refused,
// since a web page can point a name of its own at a loopback address (DNS rebinding). The answer says how to allow a
// name. token: what a request must bring (server/tls/bearer_token.h) to be shown anything but /livez and /readyz, which
// probes ask; empty: nothing.
OpsResponse AnswerOps(const OpsRequest& request, const OpsContent& content, const std::vector<std::string>& names,
                      const std::string& token = "");

}  // namespace ballast
