// Which transport a session's stream takes. Thread-compatible. A client has one for its life, so that each line is
// logged only once.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/gpu/gpu.h"
#include "proto/nccl/nccl.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/shm_transport.h"

namespace ballast {

class TransportOpener {
 public:
  // `connection` outlives it. gpu: the trainer's, nullptr: it has none; nccl: with kNccl.
  TransportOpener(Connection& connection, TransportChoice wish, std::shared_ptr<Gpu> gpu,
                  std::shared_ptr<const Nccl> nccl = nullptr)
      : connection_(connection), wish_(wish), gpu_(std::move(gpu)), nccl_(std::move(nccl)) {}

  // AttachOptions::gpu; nullptr: the trainer has none. Errors as there.
  static absl::StatusOr<std::shared_ptr<Gpu>> GpuOf(const AttachOptions& options) {
    return options.gpu ? Gpu::Open(*options.gpu) : std::shared_ptr<Gpu>();
  }
  // The NCCL that kNccl takes; nullptr: another transport is wanted. Errors as of AttachOptions::gpu.
  static absl::StatusOr<std::shared_ptr<const Nccl>> NcclOf(const AttachOptions& options);

  // Opens shared memory if the daemon offers it and is on this host; otherwise gRPC, with a line in the log if shared
  // memory was offered. Of a trainer on a GPU that the daemon's memory of one is out of reach for, a line says so too.
  // UNAVAILABLE: shared memory was required and cannot be had; any status with RetryAfter: not yet. With kNccl, gRPC beside
  // NCCL, until that was lost or refused.
  absl::StatusOr<std::unique_ptr<Transport>> Open(const v1::AttachResponse& grant);

 private:
  // nullptr: another transport is to be taken.
  std::unique_ptr<Transport> OpenNccl(const v1::AttachResponse& grant);
  absl::StatusOr<std::unique_ptr<ShmTransport>> OpenShm(const v1::AttachResponse& grant);
  // Once, until it is another.
  void Tell(std::string line);

  Connection& connection_;
  const TransportChoice wish_;
  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<const Nccl> nccl_;
  // Why none of the session's payloads go by NCCL, or no more, for good; of the thread that calls Open, and reads.
  std::shared_ptr<std::string> no_nccl_ = std::make_shared<std::string>();
  bool asked_ = false;
  std::string told_;
};

}  // namespace ballast
