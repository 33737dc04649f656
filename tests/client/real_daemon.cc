#include "tests/client/real_daemon.h"

#include <utility>

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

RealDaemon::RealDaemon(Config config, std::vector<std::unique_ptr<Device>> devices) {
  if (config.tls.on()) {
    certificates_ = CertificateKeeper::Open(config.tls, &metrics_, /*look_every=*/absl::Milliseconds(1)).value();
  }
  ops_ = OpsHttp::Start(config.ops_http.listen,
                        {.metrics = [this] { return metrics_.Serialize(); },
                         .live = [] { return absl::OkStatus(); },
                         .ready = [] { return absl::OkStatus(); }},
                        {}, {.certificates = config.ops_http.tls ? certificates_.get() : nullptr, .token = ""})
             .value();
  auto server = devices.empty() ? Server::Start(config, &metrics_, ops_->address(), nullptr, certificates_.get())
                                : Server::StartOn(std::move(devices), config, &metrics_, ops_->address(), nullptr,
                                                  certificates_.get());
  server_ = *std::move(server);
}

RealDaemon::~RealDaemon() {
  server_->Drain(/*timeout_s=*/0);
  ops_.reset();  // its threads ask the metrics
}

}  // namespace ballast
