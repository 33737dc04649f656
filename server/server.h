// The assembled daemon without its process: the gRPC port, the runs and the device. main.cc and tests start it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "server/config.h"
#include "server/device.h"
#include "server/metrics.h"

namespace ballast {

class Server {
 public:
  using OnDeviceFailure = std::function<void(const absl::Status&)>;
  // Binds config.listen (a port in use is an error naming it and the mend) and the device, and serves. `metrics`
  // outlives the server. `ops_address`: where the ops HTTP server listens, for GetServer; may be empty.
  // `on_device_failure` is called by a thread of the device when it has failed for good: no step ends any more, and
  // nothing on it can be saved.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const Config& config, Metrics* metrics, std::string ops_address,
      OnDeviceFailure on_device_failure = [](const absl::Status&) {});
  // The same on a device of the caller's.
  static absl::StatusOr<std::unique_ptr<Server>> StartOn(std::unique_ptr<Device> device, const Config& config,
                                                         Metrics* metrics, std::string ops_address);
  virtual ~Server() = default;

  virtual std::string address() const = 0;  // host:port, the real port
  virtual std::string device() const = 0;   // one line for people: "cpu, 2 threads, scalar lane (no GPU found)"
  virtual uint64_t memory_limit_bytes() const = 0;
  virtual bool ready() const = 0;  // serving, not draining
  virtual bool live() const = 0;   // the strands and the device answer

  // Not ready any more, no new runs or steps; Drain is sent on every stream; the open steps may finish within
  // timeout_s; then the port is closed. Returns the number of steps left open.
  virtual int Drain(double timeout_s) = 0;
};

}  // namespace ballast
