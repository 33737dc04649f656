#include "client/cpp/transport/connection.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/retry_after.h"
#include "proto/unix_address.h"

#include "client/cpp/transport/tls_account.h"

namespace ballast {
namespace {

// A daemon that is there answers sooner; one whose TLS is to blame is not waited for longer.
constexpr absl::Duration kUntilAccount = absl::Seconds(1);

std::string WithPort(const std::string& server) {
  if (IsUnixAddress(server)) return server;
  const size_t host_end = server.rfind(']') == std::string::npos ? 0 : server.rfind(']');
  if (server.find(':', host_end) == std::string::npos) return server + ":7700";
  return server;
}

// What looks like a secret is not repeated: errors go to logs.
absl::Status CheckName(const std::string& server) {
  if (IsUnixAddress(server)) return absl::OkStatus();
  if (server.find_first_of("@?#") == std::string::npos && !absl::StrContains(server, "://")) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "server is HOST:PORT or unix:PATH, without a scheme, a user, a password or a token: a name goes to logs and "
      "process lists. Who the client is says its certificate (tls, or BALLAST_TLS_CERTIFICATE and BALLAST_TLS_KEY)");
}

// Of what WithPort returns. gRPC takes the port modulo 65536, and asks a name server for whatever else it is given.
absl::Status CheckHostAndPort(const std::string& server) {
  if (IsUnixAddress(server)) return absl::OkStatus();
  const size_t colon = server.rfind(':');
  const absl::string_view host = absl::string_view(server).substr(0, colon);
  uint32_t port = 0;
  const bool in_brackets = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  if (!host.empty() && (in_brackets || !absl::StrContains(host, ":")) &&
      absl::SimpleAtoi(server.substr(colon + 1), &port) && port >= 1 && port <= 65535) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("server is '", server,
                                                 "', and not HOST:PORT with a port from 1 to 65535, such as node7:7700 "
                                                 "or [::1]:7700, nor unix:PATH"));
}

grpc::ChannelArguments ChannelOptions() {
  // The largest messages are specs, of at most 64 MiB, which GetRun answers with a status and all defaults filled in.
  // An answer to Attach has a few bytes for each tensor and chunk, messages of streams stay below 2 MiB.
  constexpr int kSpecBytes = 64 << 20;
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(2 * kSpecBytes);
  args.SetMaxSendMessageSize(kSpecBytes);
  // Pings while a call is open, above all the step stream; server/server.cc sets the daemon's side.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 5000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 3000);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // Clients of one process do not share a socket.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return args;
}

// Why the channel does not become ready; learned from a call that fails fast.
std::string WhyNotReady(v1::AdminService::Stub& admin) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(500)));
  v1::GetServerResponse response;
  return ConnectionReason(admin.GetServer(&context, {}, &response).error_message());
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

absl::Status FromGrpc(const grpc::Status& status, const grpc::ClientContext& context) {
  absl::Status plain = FromGrpc(status);
  if (plain.ok()) return plain;
  const auto& trailing = context.GetServerTrailingMetadata();
  const auto found = trailing.find(kRetryAfterKey);
  if (found != trailing.end())
    plain.SetPayload(kRetryAfterKey, absl::Cord({found->second.data(), found->second.size()}));
  return plain;
}

std::optional<absl::Duration> RetryAfter(const absl::Status& status) {
  const std::optional<int64_t> ms = RetryAfterMsOf(status);
  return ms.value_or(0) > 0 ? std::optional(absl::Milliseconds(*ms)) : std::nullopt;
}

bool IsPutOff(const absl::Status& status) { return absl::IsResourceExhausted(status) && RetryAfter(status); }

absl::Duration Spread(absl::Duration stated) {
  thread_local std::minstd_rand random{std::random_device{}()};
  return stated * std::uniform_real_distribution<double>(1, 1.5)(random);
}

bool IsLost(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsInternal(status) || absl::IsCancelled(status) ||
         absl::IsUnknown(status) || absl::IsDeadlineExceeded(status);
}

std::string ConnectionReason(const std::string& message) {
  const std::string lower = absl::AsciiStrToLower(message);
  for (const char* reason : {"connection refused", "connection reset", "no route to host", "network is unreachable",
                             "no such file or directory", "socket closed", "dns resolution failed"}) {
    if (absl::StrContains(lower, reason)) return reason;
  }
  if (absl::StrContains(message, "Failed parsing HTTP/2")) {
    return "what listens there is no gRPC port; a daemon's HTTP port, by default 9464, is another";
  }
  if (absl::StrContains(message, "Name or service not known")) return "the host's name is not known";
  if (message.empty() || absl::StrContains(message, "Deadline Exceeded")) return "no answer";
  if (message == "CANCELLED") return "it ended the call, as one that is shut down does";  // gRPC's word for it
  return message;
}

absl::Status CheckServer(const std::string& server) {
  if (auto s = CheckName(server); !s.ok()) return s;
  return CheckHostAndPort(WithPort(server));
}

Connection::Connection(ClientOptions options, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                       Interceptors interceptors)
    : options_(std::move(options)),
      channel_(grpc::experimental::CreateCustomChannelWithInterceptors(ForGrpc(options_.server), credentials,
                                                                       ChannelOptions(), std::move(interceptors))),
      trainer_(v1::TrainerService::NewStub(channel_)),
      admin_(v1::AdminService::NewStub(channel_)),
      follow_(v1::FollowService::NewStub(channel_)) {}

absl::StatusOr<std::unique_ptr<Connection>> Connection::Open(ClientOptions options) {
  if (auto s = CheckNotForked(); !s.ok()) return s;
  if (auto s = CheckServer(options.server); !s.ok()) return s;
  options.server = WithPort(options.server);
  const auto credentials = CredentialsFor(options.server, options.tls);
  if (!credentials.ok()) return credentials.status();
  auto interceptors = BringToken(options);
  if (!interceptors.ok()) return interceptors.status();
  if (!options.log) {
    options.log = [](const std::string& line) { std::fprintf(stderr, "ballast: %s\n", line.c_str()); };
  }
  std::unique_ptr<Connection> connection(new Connection(std::move(options), *credentials, *std::move(interceptors)));
  const absl::Duration timeout = absl::Seconds(connection->options_.connect_timeout_s);
  const absl::Duration first = std::min(timeout, kUntilAccount);
  if (connection->Await(first)) return connection;
  const std::string account = TlsAccount(connection->server(), connection->options_.tls);
  if (!account.empty()) {
    return absl::UnavailableError(
        absl::StrCat("no connection with the daemon at ", connection->server(), ": ", account));
  }
  if (connection->Await(timeout - first)) return connection;
  return absl::UnavailableError(absl::StrCat(
      "no ballastd answers at ", connection->server(), " within ", connection->options_.connect_timeout_s, " s (",
      WhyNotReady(connection->admin()), "): start one with `ballastd`, or give server=\"host:port\""));
}

bool Connection::Await(absl::Duration timeout) const {
  return channel_->WaitForConnected(absl::ToChronoTime(absl::Now() + timeout));
}

void Connection::WaitConnecting(absl::Duration duration) const {
  const absl::Time until = SteadyNow() + duration;
  for (auto state = channel_->GetState(/*try_to_connect=*/true); state != GRPC_CHANNEL_READY && SteadyNow() < until;
       state = channel_->GetState(true)) {
    channel_->WaitForStateChange(state, DeadlineAt(until));
  }
  absl::SleepFor(until - SteadyNow());
}

bool Connection::Sleep(absl::Duration duration) const {
  const absl::Time until = SteadyNow() + duration;
  for (absl::Duration left = duration;; left = until - SteadyNow()) {
    if (Interrupted()) return false;
    if (left <= absl::ZeroDuration()) return true;
    WaitConnecting(std::min(left, kInterruptGlance));
  }
}

void Connection::Log(const std::string& line) const { options_.log(line); }

absl::Status Connection::Explain(const absl::Status& status) const {
  const bool lost = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
  if (RetryAfter(status) || !lost) return status;
  const std::string account = TlsAccount(server(), options_.tls);
  return absl::UnavailableError(
      absl::StrCat("the daemon at ", server(),
                   " does not answer: ", account.empty() ? ConnectionReason(std::string(status.message())) : account));
}

}  // namespace ballast
