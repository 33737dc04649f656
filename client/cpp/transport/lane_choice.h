// Which lane a session's stream takes. Thread-compatible; one for a client's life, so that what it says, it says once.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/lane.h"

namespace ballast {

class LaneChoice {
 public:
  // `connection` outlives it.
  LaneChoice(Connection& connection, LaneWish wish) : connection_(connection), wish_(wish) {}

  // Shared memory where the daemon offers it and is within reach, that is on this host; else gRPC, with a line in the
  // log where it was offered. UNAVAILABLE: shared memory was asked for and cannot be had.
  absl::StatusOr<std::unique_ptr<Lane>> Open(const v1::AttachResponse& grant);

 private:
  Connection& connection_;
  const LaneWish wish_;
  bool asked_ = false;
  std::string told_;
};

}  // namespace ballast
