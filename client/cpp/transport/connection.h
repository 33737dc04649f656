// One channel to a daemon, its unary calls and what their errors mean. Every call has a deadline, except the streams,
// whose dead peers the keep-alive finds within 8 s. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/utf8.h"

#include "ballast/v1/admin.grpc.pb.h"
#include "ballast/v1/follow.grpc.pb.h"
#include "ballast/v1/trainer.grpc.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/fork_watch.h"
#include "client/cpp/transport/steady.h"
#include "client/cpp/transport/token.h"

namespace ballast {

// The status with the same code and message.
absl::Status FromGrpc(const grpc::Status& status);
// The same, with the delay after which the daemon wants to be asked again, which is trailing metadata of the call;
// RetryAfter returns it.
absl::Status FromGrpc(const grpc::Status& status, const grpc::ClientContext& context);
std::optional<absl::Duration> RetryAfter(const absl::Status& status);
// Whether the daemon is there, has no room now, and says when to ask again.
bool IsPutOff(const absl::Status& status);
// `stated`, or up to half as much again, at random: of many that were told the same not all ask at once.
absl::Duration Spread(absl::Duration stated);

// Whether trying again may help: the connection or the daemon went away, rather than refused.
bool IsLost(const absl::Status& status);

// "connection refused" and the like out of gRPC's account of a failed connection.
std::string ConnectionReason(const std::string& message);

// INVALID_ARGUMENT: it is no HOST, HOST:PORT or unix:PATH.
absl::Status CheckServer(const std::string& server);

class Connection {
 public:
  // UNAVAILABLE with the fix when no daemon answers within connect_timeout_s, or sooner where TLS is why. INVALID_ARGUMENT,
  // FAILED_PRECONDITION: of the server's name, and as CheckNotForked, CredentialsFor and BringToken.
  static absl::StatusOr<std::unique_ptr<Connection>> Open(ClientOptions options);

  const ClientOptions& options() const { return options_; }
  const std::string& server() const { return options_.server; }
  v1::TrainerService::Stub& trainer() { return *trainer_; }
  v1::AdminService::Stub& admin() { return *admin_; }
  v1::FollowService::Stub& follow() { return *follow_; }
  void Log(const std::string& line) const;
  // As in ClientOptions.
  bool Interrupted() const { return options_.interrupted && options_.interrupted(); }
  static constexpr absl::Duration kInterruptGlance = absl::Milliseconds(100);
  // CreateRun reserves and clears memory, at worst hundreds of gigabytes at some gigabytes a second.
  static constexpr absl::Duration kCallTimeout = absl::Seconds(120);
  // AmendRun may have all of a run stored otherwise, at worst some ten million parameters a second.
  static constexpr absl::Duration kConvertTimeout = absl::Seconds(1800);
  // Checkpoint writes all of a run to a disk, and Restore reads it, at worst a terabyte at some hundred megabytes a
  // second.
  static constexpr absl::Duration kStorageTimeout = absl::Seconds(7200);

  // Waits, and meanwhile lets gRPC make a connection that was lost anew: it does so only while somebody waits on it, and a
  // handshake of TLS, with its several messages, would not end within the pauses between calls.
  void WaitConnecting(absl::Duration duration) const;
  // The same, with a look at whether the caller is interrupted every kInterruptGlance; false: it is.
  bool Sleep(absl::Duration duration) const;

  // A status of FromGrpc; UNAVAILABLE, with the server's name in front, if the server could not be reached or went away.
  absl::Status Explain(const absl::Status& status) const;

  // Makes a unary call; returns the status of FromGrpc, or of CheckText: the daemon cannot read such a request, and could
  // not say why. Asks a busy daemon again when it says, within the timeout, unless the caller is interrupted.
  template <typename Stub, typename Request, typename Response>
  absl::Status Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response, absl::Duration timeout = kCallTimeout) {
    if (auto s = CheckText(request); !s.ok()) return s;
    for (const absl::Time give_up = SteadyNow() + timeout;;) {
      grpc::ClientContext context;
      context.set_deadline(DeadlineAt(give_up));
      absl::Status status = FromGrpc((stub.*method)(&context, request, response), context);
      const auto retry_after = RetryAfter(status);
      if (!IsPutOff(status) || SteadyNow() + *retry_after > give_up) return status;
      if (!Sleep(Spread(*retry_after))) return status;
    }
  }

 private:
  Connection(ClientOptions options, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
             Interceptors interceptors);
  bool Await(absl::Duration timeout) const;

  const ForkWatch watch_;  // first: it ends after the channel
  const ClientOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::TrainerService::Stub> trainer_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
  std::unique_ptr<v1::FollowService::Stub> follow_;
};

}  // namespace ballast
