#include "tests/client/real_daemon.h"

namespace ballast {

Config RealDaemon::Small() {
  Config config;
  config.listen = "127.0.0.1:0";
  config.device = "cpu";
  config.threads = 2;
  config.memory_limit = 1 << 30;
  config.ops_http.listen = "127.0.0.1:0";
  config.limits.chunk_bytes = 16 << 10;
  config.limits.credit_bytes = 256 << 10;
  return config;
}

RealDaemon::RealDaemon(Config config) {
  ops_ = OpsHttp::Start(config.ops_http.listen, {.metrics = [this] { return metrics_.Serialize(); },
                                                 .live = [] { return absl::OkStatus(); },
                                                 .ready = [] { return absl::OkStatus(); }})
             .value();
  server_ = Server::Start(config, &metrics_, ops_->address()).value();
}

RealDaemon::~RealDaemon() {
  server_->Drain(/*timeout_s=*/0);
  ops_.reset();  // its threads ask the metrics
}

}  // namespace ballast
