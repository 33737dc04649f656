// Which transport a session's stream takes. Thread-compatible. A client has one for its life, so that each line is
// logged only once.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/transport.h"

namespace ballast {

class TransportOpener {
 public:
  // `connection` outlives it.
  TransportOpener(Connection& connection, TransportChoice wish) : connection_(connection), wish_(wish) {}

  // Opens shared memory if the daemon offers it and is on this host; otherwise gRPC, with a line in the log if shared
  // memory was offered. UNAVAILABLE: shared memory was required and cannot be had.
  absl::StatusOr<std::unique_ptr<Transport>> Open(const v1::AttachResponse& grant);

 private:
  Connection& connection_;
  const TransportChoice wish_;
  bool asked_ = false;
  std::string told_;
};

}  // namespace ballast
