// Decides whether a failed call is made again, and waits before that. Either the connection was lost, which may last
// for ClientOptions::reconnect_timeout_s without progress; or the daemon said when to ask again (RetryAfter). For calls
// that may reach the daemon twice. Blocks the thread that asks; thread-compatible, one for each call.
//
//   for (Retry retry(connection, "pulling weights");;) {
//     const absl::Status status = ...;
//     if (status.ok()) return status;
//     if (!retry.Again(status)) return retry.Explain(status);
//   }
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/cpp/transport/connection.h"

namespace ballast {

// The wait before an attempt: none before the first, then 50 ms, doubling up to 1 s; at random between half and all of
// that.
absl::Duration Backoff(int attempt);

// How long a daemon may go on saying when to ask again.
inline constexpr absl::Duration kBusyPatience = absl::Seconds(120);

class Retry {
 public:
  // How long a call may be put off by a daemon that is there.
  struct Waits {
    // How long to wait for a lease that another holds (ALREADY_EXISTS), from now on. Once an answer was lost,
    // reconnect_timeout_s more, since the lease may then be the caller's own.
    absl::Duration lease = absl::ZeroDuration();
    std::optional<absl::Duration> step = {};  // for the end of an open step (UNAVAILABLE); none: as for a busy daemon
  };

  // `what`: for the log.
  Retry(const Connection& connection, std::string what, Waits waits);
  Retry(const Connection& connection, std::string what) : Retry(connection, std::move(what), Waits()) {}

  // Waits, and returns true when the call is to be made again. `failure`: as FromGrpc returned it. False at once, if
  // another attempt would not help or be too late; false also when the caller is interrupted.
  bool Again(const absl::Status& failure);
  // Who holds the lease had it for good until now.
  void LeaseBegins() { began_ = SteadyNow(); }
  // Something came since the last failure, so the connection was there, and may be lost for as long again.
  void Progress();
  // The last failure, for people.
  absl::Status Explain(const absl::Status& failure) const;
  // Whether an interrupt ended the retries.
  bool interrupted() const { return interrupted_; }

 private:
  bool WaitForConnection(const absl::Status& failure);
  bool Sleep(absl::Duration duration);
  bool WaitAsTold(const absl::Status& failure, absl::Duration stated);
  absl::Time PatienceEnds(const absl::Status& failure) const;

  const Connection& connection_;
  const std::string what_;
  const absl::Duration allowed_;  // without a connection
  const Waits waits_;
  absl::Time began_ = SteadyNow();
  int attempts_ = 0;
  std::optional<absl::Time> lost_at_;  // since the last progress
  std::optional<absl::Time> busy_at_;  // likewise: when the daemon began to say so
  bool ever_lost_ = false;
  bool interrupted_ = false;
  bool told_ = false;  // that it waits as the daemon asked
};

// The answer of a unary call, which is made again as Retry says. `what`: for the log.
template <typename Response, typename Stub, typename Request>
absl::StatusOr<Response> CallAgain(Connection& connection, const std::string& what, Stub& stub,
                                   grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                   const Request& request, absl::Duration timeout = Connection::kCallTimeout) {
  for (Retry retry(connection, what);;) {
    Response response;
    const absl::Status status = connection.Call(stub, method, request, &response, timeout);
    if (status.ok()) return response;
    if (!retry.Again(status)) return retry.Explain(status);
  }
}

}  // namespace ballast
