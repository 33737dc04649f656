// A whole daemon in this process, on ports of its own, for the tests that train for real.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/metrics/metrics.h"
#include "server/ops/ops_http.h"
#include "server/server.h"

namespace ballast {

class RealDaemon {
 public:
  // devices: its own; none: as the configuration says.
  explicit RealDaemon(Config config = Small(), std::vector<std::unique_ptr<Device>> devices = {});
  ~RealDaemon();

  // Where the configuration has TLS, its files are looked at every millisecond. 16 KiB chunks, so that small tensors have
  // several.
  static Config Small();

  std::string address() const { return server_->address(); }
  std::string ops_address() const { return ops_->address(); }
  Server& server() { return *server_; }
  std::string metrics() const { return metrics_.Serialize(); }

 private:
  Metrics metrics_{BuildInfo{}};
  std::unique_ptr<CertificateKeeper> certificates_;  // with TLS
  std::unique_ptr<OpsHttp> ops_;
  std::unique_ptr<Server> server_;
};

}  // namespace ballast
