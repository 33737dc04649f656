// The assembled daemon without its process: the gRPC port, the runs and the devices. main.cc and tests start it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "server/config/config.h"
#include "server/device/device.h"
#include "server/metrics/metrics.h"
#include "server/ops/ops_http.h"
#include "server/tls/certificate_keeper.h"

namespace ballast {

class Server {
 public:
  // No device is left, for this last reason: no step ends any more, and nothing can be saved. Must not block.
  using OnLastFailure = std::function<void(const absl::Status&)>;
  // Opens the devices, binds config.listen (a port in use is an error naming it and the fix), and serves. `metrics`
  // outlives the server. `ops_address`: where the ops HTTP server listens, for GetServer; may be empty. `certificates`:
  // where config.tls is on, those that the port shows and takes; outlive the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config, Metrics* metrics, std::string ops_address,
                                                       OnLastFailure on_last_failure = nullptr,
                                                       const CertificateKeeper* certificates = nullptr);
  // The same on devices of the caller's.
  static absl::StatusOr<std::unique_ptr<Server>> StartOn(std::vector<std::unique_ptr<Device>> devices,
                                                         const Config& config, Metrics* metrics,
                                                         std::string ops_address,
                                                         OnLastFailure on_last_failure = nullptr,
                                                         const CertificateKeeper* certificates = nullptr);
  virtual ~Server() = default;

  virtual std::string address() const = 0;  // host:port, the real port
  virtual std::string device() const = 0;   // one line for people: "cpu, 2 threads, avx2 (no GPU found)"
  virtual uint64_t memory_limit_bytes() const = 0;
  virtual bool ready() const = 0;         // serving, not draining
  virtual absl::Status live() const = 0;  // OK: the strands, the device and the port answer
  // As in OpsContent.
  virtual OpsResponse AnswerApi(const std::string& path, const std::string& query) = 0;

  // Not ready any more, no new runs or steps; Drain is sent on every stream; the open steps may finish within
  // timeout_s; then the port is closed. Returns the number of steps left open.
  virtual int Drain(double timeout_s) = 0;
  virtual bool wrote_all() const = 0;  // false: Drain could not write the last step of some run
};

}  // namespace ballast
