#include "server/ops/ops_http.h"

#include <arpa/inet.h>
#include <civetweb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#include "server/base/clock.h"
#include "server/base/host.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/base/utf8.h"
#include "server/config/config_check.h"
#include "server/ops/ops_page.h"
#include "server/ops/tls_relay.h"
#include "server/tls/bearer_token.h"

namespace ballast {
namespace {

constexpr char kHelp[] =
    "ballastd\n\n"
    "/         the live page: open it in a browser\n"
    "/runbook  what to do about each alert\n"
    "/metrics  Prometheus metrics\n"
    "/livez    200 while the daemon works, 503 with the reason when it should be restarted\n"
    "/readyz   200 while it takes trainers, 503 with the reason when not\n"
    "/api/v1/  what the page shows, as JSON: status, runs, runs/ID, runs/ID/spec, runs/ID/history?after=STEP&most=N\n";
constexpr char kApi[] = "/api/v1/", kMetrics[] = "/metrics";
const OpsResponse kTooMany = {.status = 503, .body = "Too many ask at once; ask again in a second.\n"};

// The page loads from its own origin alone, runs no inline script, and is shown in no other page.
constexpr char kPagePolicy[] = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

// CivetWeb waits 2 s for a client to take or to say more. One that took longer than kPieceS for a piece of an answer,
// even if it took it then, or for all pieces longer than kAnswerS, is cut off.
constexpr char kStillMs[] = "2000";
constexpr double kPieceS = 1, kAnswerS = 10;
constexpr size_t kPieceBytes = 16 << 10;

// The Host header without its port. Its case stays: names are compared without regard to case.
std::string HostOf(absl::string_view header) {
  if (absl::StartsWith(header, "[")) return std::string(header.substr(1, header.find(']') - 1));
  return std::string(header.substr(0, header.find(':')));
}

bool KnownHost(absl::string_view header, const std::vector<std::string>& names) {
  // Browsers always send the header; other clients may leave it out.
  if (header.empty()) return true;
  std::string host = HostOf(header);
  if (absl::EndsWith(host, ".")) host.pop_back();  // of a name that is written in full
  const auto is_it = [&](const std::string& name) {
    return name == "*" || (!host.empty() && absl::EqualsIgnoreCase(host, name));
  };
  return IsIpLiteral(host) || absl::EqualsIgnoreCase(host, "localhost") ||
         std::any_of(names.begin(), names.end(), is_it);
}

OpsResponse RefuseHost(absl::string_view header) {
  const std::string host = ValidUtf8(HostOf(header), 255);
  return {.status = 403,
          .body = absl::StrCat("The name '", host,
                               "' is not served: use an IP address, localhost or the machine's "
                               "hostname, or allow it with --ops_http.hosts ",
                               host, "\n")};
}

OpsResponse AnswerHealth(const absl::Status& status) {
  if (status.ok()) return {.body = "ok\n"};
  return {.status = 503, .body = absl::StrCat(status.message(), "\n")};
}

OpsResponse AnswerPage(const PageFile& file) {
  return {
      .content_type = std::string(file.content_type), .body = std::string(file.body), .content_policy = kPagePolicy};
}

const char* ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 500:
      return "Internal Server Error";
    default:
      return "Service Unavailable";
  }
}

// A browser asks its user for a name and a password where the scheme is Basic.
const char* ExtraHeader(int status) {
  if (status == 401) return "WWW-Authenticate: Bearer\r\nWWW-Authenticate: Basic realm=\"ballastd\"\r\n";
  return status == 405 ? "Allow: GET, HEAD\r\n" : "";
}

std::string Head(const OpsResponse& response) {
  return absl::StrFormat(
      "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\nCache-Control: no-store\r\n"
      "X-Content-Type-Options: nosniff\r\nContent-Security-Policy: %s\r\n%s\r\n",
      response.status, ReasonPhrase(response.status), response.content_type, response.body.size(),
      response.content_policy, ExtraHeader(response.status));
}

// Opens a connection and drops it.
void Knock(const std::string& host, int port) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, host.c_str(), &to.sin_addr) != 1) return;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to));  // a wildcard address means this machine
  close(fd);
}

// Writes in pieces, since mg_write waits anew whenever some bytes have gone.
void SendPieces(mg_connection* connection, std::string_view answer) {
  const double begin_s = MonotonicSeconds();
  double piece_s = begin_s;
  while (!answer.empty() && piece_s - begin_s < kAnswerS) {
    const size_t bytes = std::min(answer.size(), kPieceBytes);
    if (mg_write(connection, answer.data(), bytes) != static_cast<int>(bytes)) return;
    answer.remove_prefix(bytes);
    const double now_s = MonotonicSeconds();
    if (now_s - piece_s > kPieceS) return;
    piece_s = now_s;
  }
}

// Bounds how many requests are answered at a time, and how many wait.
class Gate {
 public:
  explicit Gate(int places) : places_(places) {}
  // Waits for a turn. False: too many wait already.
  bool Enter() {
    absl::MutexLock lock(&mu_);
    if (waiting_ == OpsHttp::kWaiting) return false;
    ++waiting_;
    mu_.Await(absl::Condition(this, &Gate::HasRoom));
    --waiting_;
    ++served_;
    return true;
  }
  void Leave() {
    absl::MutexLock lock(&mu_);
    --served_;
  }

 private:
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return served_ < places_; }
  const int places_;
  absl::Mutex mu_;
  int served_ ABSL_GUARDED_BY(mu_) = 0, waiting_ ABSL_GUARDED_BY(mu_) = 0;
};

bool IsHealth(const OpsRequest& request) { return request.path == "/livez" || request.path == "/readyz"; }

std::string Ipv4Of(const std::string& host) { return host == "localhost" ? "127.0.0.1" : host; }

absl::Status CannotListen(const std::string& host, uint16_t port, const std::string& reason) {
  const bool in_use = absl::StrContains(reason, "Address already in use");
  return absl::UnavailableError(
      absl::StrCat("ops_http.listen: cannot listen on ", host, ":", port, ": ",
                   in_use ? "the port is in use, perhaps by another ballastd" : reason,
                   "; choose another with --ops_http.listen HOST:PORT, or switch it off with --ops_http.listen off"));
}

// CivetWeb's C interface: the C++ one throws, and adds nothing needed here.
class CivetOps final : public OpsHttp {
 public:
  CivetOps(std::string host, std::vector<std::string> names, OpsContent content, std::string token)
      : host_(std::move(host)), content_(std::move(content)), names_(std::move(names)), token_(std::move(token)) {}

  // The thread that accepts looks whether it must stop only every 2 s and after each connection, so it gets one.
  ~CivetOps() override {
    if (context_ == nullptr) return;
    absl::Notification stopped;
    std::thread stopper([&] {
      mg_stop(context_);
      stopped.Notify();
    });
    do {
      Knock(bind_host(), port_);
    } while (!stopped.WaitForNotificationWithTimeout(absl::Milliseconds(5)));
    stopper.join();
  }

  absl::Status Listen(uint16_t port) {
    static const unsigned initialized = mg_init_library(0);
    static_cast<void>(initialized);
    const std::string ports = absl::StrCat(bind_host(), ":", port);
    const std::string threads = absl::StrCat(kThreads);
    const std::string queue = absl::StrCat(kQueue);
    std::array<const char*, 11> options = {"listening_ports",
                                           ports.c_str(),
                                           "num_threads",
                                           threads.c_str(),
                                           "connection_queue",
                                           queue.c_str(),
                                           "request_timeout_ms",
                                           kStillMs,
                                           "enable_directory_listing",
                                           "no",
                                           nullptr};
    mg_callbacks callbacks{};
    callbacks.log_message = OnLog;
    mg_init_data init{.callbacks = &callbacks, .user_data = this, .configuration_options = options.data()};
    unsigned code = 0;
    std::array<char, 256> text{};
    mg_error_data error{.code = &code, .text = text.data(), .text_buffer_size = text.size()};
    context_ = mg_start2(&init, &error);
    if (context_ == nullptr) return CannotListen(host_, port, first_log_.empty() ? text.data() : first_log_);
    mg_set_request_handler(context_, "/", OnRequest, this);
    mg_server_port listening{};
    if (mg_get_server_ports(context_, 1, &listening) == 1) port_ = listening.port;
    return absl::OkStatus();
  }

  std::string address() const override { return absl::StrCat(host_, ":", port_); }
  uint16_t port() const { return static_cast<uint16_t>(port_); }

 private:
  std::string bind_host() const { return Ipv4Of(host_); }

  static int OnLog(const mg_connection* connection, const char* message) {
    auto* self = static_cast<CivetOps*>(mg_get_user_data(mg_get_context(connection)));
    // CivetWeb logs errors of the start on the thread that starts it; the caller reports them.
    if (self != nullptr && self->context_ == nullptr) {
      if (self->first_log_.empty()) self->first_log_ = message;
    } else {
      Log(LogLevel::kWarn, "ops_http", "message of the HTTP server", {{"err", message}});
    }
    return 1;
  }

  static int OnRequest(mg_connection* connection, void* self) {
    auto* ops = static_cast<CivetOps*>(self);
    const mg_request_info* info = mg_get_request_info(connection);
    const auto header = [&](const char* name) {
      const char* const value = mg_get_header(connection, name);
      return std::string(value == nullptr ? "" : value);
    };
    const OpsRequest request{.method = info->request_method,
                             .path = info->local_uri == nullptr ? "" : info->local_uri,
                             .query = info->query_string == nullptr ? "" : info->query_string,
                             .host = header("Host"),
                             .authorization = header("Authorization")};
    if (IsHealth(request)) return ops->Answer(connection, request);
    Gate& gate = request.path == kMetrics ? ops->scrapers_ : ops->viewers_;
    if (!gate.Enter()) return Send(connection, request, kTooMany);
    const int status = ops->Answer(connection, request);
    gate.Leave();
    return status;
  }

  int Answer(mg_connection* connection, const OpsRequest& request) const {
    return Send(connection, request, AnswerOps(request, content_, names_, token_));
  }

  // Returns the status.
  static int Send(mg_connection* connection, const OpsRequest& request, const OpsResponse& response) {
    SendPieces(connection, request.method == "HEAD" ? Head(response) : absl::StrCat(Head(response), response.body));
    return response.status;
  }

  const std::string host_;
  const OpsContent content_;
  const std::vector<std::string> names_;
  const std::string token_;
  Gate viewers_{kViewers}, scrapers_{kScrapers};
  std::string first_log_;  // while starting
  mg_context* context_ = nullptr;
  int port_ = 0;
};

// HTTPS: the HTTP server is at a port of its own on loopback, and only there, where what it asks for is the same.
class HttpsOps final : public OpsHttp {
 public:
  HttpsOps(std::unique_ptr<CivetOps> http, const std::string& host, std::unique_ptr<TlsRelay> relay)
      : http_(std::move(http)), relay_(std::move(relay)), address_(absl::StrCat(host, ":", relay_->port())) {}
  std::string address() const override { return address_; }

 private:
  const std::unique_ptr<CivetOps> http_;
  const std::unique_ptr<TlsRelay> relay_;  // before it ends what it hands on to
  const std::string address_;
};

class NoOps final : public OpsHttp {
 public:
  std::string address() const override { return ""; }
};

}  // namespace

OpsResponse AnswerOps(const OpsRequest& request, const OpsContent& content, const std::vector<std::string>& names,
                      const std::string& token) {
  if (!KnownHost(request.host, names)) return RefuseHost(request.host);
  if (!token.empty() && !IsHealth(request) && !BringsToken(request.authorization, token)) {
    return {.status = 401,
            .body =
                "Send the header 'Authorization: Bearer TOKEN' with the token of ops_http.token_file; in a browser, "
                "any name and the token as the password.\n"};
  }
  const PageFile* page = FindPageFile(request.path);
  const bool known = page != nullptr || absl::StartsWith(request.path, kApi) || request.path == "/help" ||
                     request.path == kMetrics || request.path == "/livez" || request.path == "/readyz";
  if (!known) return {.status = 404, .body = "Not found; see /help\n"};
  if (request.method != "GET" && request.method != "HEAD") return {.status = 405, .body = "GET or HEAD only.\n"};
  if (page != nullptr) return AnswerPage(*page);
  if (request.path == "/livez") return AnswerHealth(content.live());
  if (request.path == "/readyz") return AnswerHealth(content.ready());
  if (request.path == "/help") return {.body = kHelp};
  if (absl::StartsWith(request.path, kApi)) return content.api(request.path.substr(strlen(kApi)), request.query);
  return {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = content.metrics()};
}

absl::StatusOr<std::unique_ptr<OpsHttp>> OpsHttp::Start(const std::string& listen, OpsContent content,
                                                        const std::vector<std::string>& hosts, OpsSecurity security) {
  if (listen == "off") return std::make_unique<NoOps>();
  ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(listen));
  std::vector<std::string> names = MachineNames();
  names.insert(names.end(), hosts.begin(), hosts.end());
  const bool tls = security.certificates != nullptr;
  auto ops = std::make_unique<CivetOps>(tls ? "127.0.0.1" : at.host, std::move(names), std::move(content),
                                        std::move(security.token));
  RETURN_IF_ERROR(ops->Listen(tls ? 0 : at.port));
  if (!tls) return ops;
  auto relay = TlsRelay::Start(Ipv4Of(at.host), at.port, ops->port(), security.certificates);
  if (!relay.ok()) return CannotListen(at.host, at.port, std::string(relay.status().message()));
  return std::make_unique<HttpsOps>(std::move(ops), at.host, *std::move(relay));
}

}  // namespace ballast
