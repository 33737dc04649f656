// Which transport a session's stream takes. Thread-compatible. A client has one for its life, so that each line is
// logged only once.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/gpu/gpu.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/shm_transport.h"

namespace ballast {

class TransportOpener {
 public:
  // `connection` outlives it.
  // gpu: the trainer's; nullptr: it has none.
  TransportOpener(Connection& connection, TransportChoice wish, std::shared_ptr<Gpu> gpu)
      : connection_(connection), wish_(wish), gpu_(std::move(gpu)) {}

  // AttachOptions::gpu; nullptr: the trainer has none. Errors as there.
  static absl::StatusOr<std::shared_ptr<Gpu>> GpuOf(const AttachOptions& options) {
    return options.gpu ? Gpu::Open(*options.gpu) : std::shared_ptr<Gpu>();
  }

  // Opens shared memory if the daemon offers it and is on this host; otherwise gRPC, with a line in the log if shared
  // memory was offered. Of a trainer on a GPU that the daemon's memory of one is out of reach for, a line says so too.
  // UNAVAILABLE: shared memory was required and cannot be had.
  absl::StatusOr<std::unique_ptr<Transport>> Open(const v1::AttachResponse& grant);

 private:
  absl::StatusOr<std::unique_ptr<ShmTransport>> OpenShm(const v1::AttachResponse& grant);
  // Once, until it is another.
  void Tell(std::string line);

  Connection& connection_;
  const TransportChoice wish_;
  std::shared_ptr<Gpu> gpu_;
  bool asked_ = false;
  std::string told_;
};

}  // namespace ballast
