// The HTTP port for machines and people that watch: /metrics, /livez, /readyz and an index of these at /. It changes
// nothing and knows no secrets; GET and HEAD only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast {

// What the port shows. Called by the server's threads, several at once; must not block.
struct OpsContent {
  std::function<std::string()> metrics;  // text exposition 0.0.4
  std::function<absl::Status()> live;    // OK, or what does not answer
  std::function<absl::Status()> ready;   // OK, or why not
};

// Requests are answered by kThreads threads; one that takes longer than 5 s to say what it wants is cut off.
// Thread-safe.
class OpsHttp {
 public:
  static constexpr int kThreads = 4;

  // listen: "off", or HOST:PORT where HOST is an IPv4 address or localhost and port 0 picks a free one. UNAVAILABLE
  // names the address that cannot be had, and the mend.
  static absl::StatusOr<std::unique_ptr<OpsHttp>> Start(const std::string& listen, OpsContent content);
  // Waits for the requests being answered.
  virtual ~OpsHttp() = default;

  // HOST:PORT, the real port; empty when off.
  virtual std::string address() const = 0;
};

// The part of it without sockets.
struct OpsRequest {
  std::string method;
  std::string path;  // without the query
  std::string host;  // the header; empty: there was none
};
struct OpsResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};
// `hostname`: the machine's. A Host header is an IP address, localhost or the hostname; anything else is refused, since
// a web page can point a name of its own at a loopback address (DNS rebinding).
OpsResponse AnswerOps(const OpsRequest& request, const OpsContent& content, const std::string& hostname);

}  // namespace ballast
