#include "server/rpc/tcp_listener.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/config/config_check.h"
#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

constexpr uint32_t kMostByDefault = 4096;
// As gRPC sets it for a server that pings: unanswered data ends a connection after as long as a ping does.
constexpr int kUserTimeoutMs = 3000;
constexpr int kIdleS = 60, kProbeS = 10;  // TCP's own keep-alive
constexpr int kRestMs = 100;

bool IsWildcard(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

sockaddr_in6 Wildcard(uint16_t port) {
  sockaddr_in6 all{};
  all.sin6_family = AF_INET6;
  all.sin6_port = htons(port);
  return all;
}

// sin_port and sin6_port are at the same offset.
void SetPort(uint16_t port, sockaddr* address) { reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(port); }

std::string PeerText(const sockaddr_storage& peer) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  const int error = getnameinfo(reinterpret_cast<const sockaddr*>(&peer), sizeof peer, host.data(), host.size(),
                                port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  return error != 0 ? "unknown" : absl::StrCat(host.data(), " port ", port.data());
}

// A server's first words in HTTP/2, SETTINGS, and its last, GOAWAY with ENHANCE_YOUR_CALM.
std::string Farewell(absl::string_view why) {
  constexpr char kSettings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};
  constexpr char kGoAway[] = {7, 0, 0, 0, 0, 0, /*last stream*/ 0, 0, 0, 0, /*code*/ 0, 0, 0, 11};
  const auto bytes = static_cast<char>(8 + why.size());  // less than 128
  return absl::StrCat(absl::string_view(kSettings, sizeof kSettings), absl::string_view("\0\0", 2),
                      absl::string_view(&bytes, 1), absl::string_view(kGoAway, sizeof kGoAway), why);
}

// A server's only words in TLS: a fatal alert, internal_error, which it may send before any other.
std::string Alert() {
  constexpr char kAlert[] = {21, 3, 3, 0, 2, /*fatal*/ 2, 80};
  return {kAlert, sizeof kAlert};
}

absl::Status NoDescriptor(absl::string_view why) { return RefusedConnection("descriptors", why); }

bool NoneLeft(int error) { return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM; }

}  // namespace

absl::StatusOr<uint32_t> MostConnections(uint32_t configured, uint64_t descriptors) {
  if (descriptors < kLeastDescriptors) {
    return absl::FailedPreconditionError(absl::StrCat("this process may have ", descriptors, " files open and needs ",
                                                      kLeastDescriptors,
                                                      " at least; raise its limit (ulimit -n, LimitNOFILE)"));
  }
  const uint64_t room = descriptors - kKeptDescriptors;
  if (configured == 0) return static_cast<uint32_t>(std::min<uint64_t>(room / 2, kMostByDefault));
  if (configured <= room) return configured;
  return absl::FailedPreconditionError(
      absl::StrCat("limits.connections: ", configured, " connections do not fit the ", descriptors,
                   " files that this process may have open, of which ", kKeptDescriptors,
                   " are kept for its own use; lower it, or raise the process's limit (ulimit -n, LimitNOFILE)"));
}

absl::StatusOr<std::unique_ptr<TcpListener>> TcpListener::Bind(const std::string& listen) {
  ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(listen));
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int error = 0;
  std::string why;
  std::unique_ptr<TcpListener> made(new TcpListener);
  if (const int unknown = getaddrinfo(at.host.c_str(), nullptr, &hints, &found); unknown != 0) {
    why = gai_strerror(unknown);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const sockaddr_in6 all = Wildcard(at.port);
    if (IsWildcard(*each->ai_addr) && made->Add(reinterpret_cast<const sockaddr*>(&all), sizeof all, &error)) break;
    SetPort(made->fds_.empty() ? at.port : made->port(), each->ai_addr);
    made->Add(each->ai_addr, each->ai_addrlen, &error);
  }
  made->stop_fd_ = eventfd(0, EFD_CLOEXEC);
  if (made->stop_fd_ < 0) return absl::UnavailableError("the system refused an eventfd");
  if (!made->fds_.empty()) return made;
  if (why.empty()) why = error == EADDRINUSE ? "the address is in use" : std::strerror(error);
  return absl::UnavailableError(absl::StrCat("cannot listen on ", listen, ": ", why,
                                             "; choose another with listen (port 0 picks a free one)",
                                             error == EADDRINUSE ? ", or stop what holds it" : ""));
}

bool TcpListener::Add(const sockaddr* address, socklen_t bytes, int* error) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1, off = 0;
  if (fd >= 0) {
    // Accepted sockets inherit these options. If the kernel refuses one of them, the port works all the same.
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof kUserTimeoutMs);
    // A host that vanished with an idle connection leaves its place: gRPC pings only while a call is open.
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kIdleS, sizeof kIdleS);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeS, sizeof kProbeS);
    if (IsWildcard(*address) && address->sa_family == AF_INET6) {
      setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
  }
  if (fd >= 0 && bind(fd, address, bytes) == 0 && listen(fd, SOMAXCONN) == 0) {
    fds_.push_back(fd);
    return true;
  }
  *error = errno;
  if (fd >= 0) close(fd);
  return false;
}

TcpListener::~TcpListener() {
  if (thread_.joinable()) {
    eventfd_write(stop_fd_, 1);
    thread_.join();
  }
  if (stop_fd_ >= 0) close(stop_fd_);
  for (const int fd : fds_) close(fd);
}

uint16_t TcpListener::port() const {
  const sockaddr_storage address = dial_address();
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

sockaddr_storage TcpListener::dial_address() const {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  getsockname(fds_.front(), reinterpret_cast<sockaddr*>(&address), &bytes);
  if (!IsWildcard(reinterpret_cast<const sockaddr&>(address))) return address;
  // A machine without addresses of IPv6 has its wildcard all the same.
  auto& loopback = reinterpret_cast<sockaddr_in&>(address);
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

void TcpListener::Serve(ConnectionTable* table, Metrics* metrics, bool tls, OnConnection on_connection) {
  table_ = table;
  metrics_ = metrics;
  tls_ = tls;
  on_connection_ = std::move(on_connection);
  thread_ = std::thread([this] { Run(); });
}

void TcpListener::Run() {
  std::vector<pollfd> waited = {{.fd = stop_fd_, .events = POLLIN, .revents = 0}};
  for (const int fd : fds_) waited.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  while (true) {
    const size_t watched = rest_ ? 1 : waited.size();
    rest_ = false;
    for (pollfd& each : waited) each.revents = 0;
    poll(waited.data(), watched, watched == 1 ? kRestMs : -1);
    if (waited[0].revents != 0) return;
    for (size_t i = 1; i < watched; ++i) {
      if (waited[i].revents != 0) AcceptOne(waited[i].fd);
    }
  }
}

void TcpListener::AcceptOne(int listener_fd) {
  sockaddr_storage peer{};
  socklen_t bytes = sizeof peer;
  const auto accept = [&] {
    return accept4(listener_fd, reinterpret_cast<sockaddr*>(&peer), &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
  };
  if (const int fd = accept(); fd >= 0) return Admit(listener_fd, fd, peer);
  if (!NoneLeft(errno)) return;  // nobody, or one that has left again
  rest_ = !spare_.Use([&] {
    if (const int fd = accept(); fd >= 0)
      Refuse(fd, PeerText(peer), NoDescriptor("the daemon has no file descriptor left"));
  });
}

void TcpListener::Refuse(int fd, const std::string& peer, const absl::Status& why) const {
  metrics_->Count("ballast_connections_refused_total", ReasonOf(why));
  Log(LogLevel::kWarn, "connection_refused", "a connection was refused",
      {{"peer", peer}, {"reason", std::string(why.message())}});
  const std::string farewell = tls_ ? Alert() : Farewell(why.message().substr(0, 110));
  send(fd, farewell.data(), farewell.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  shutdown(fd, SHUT_WR);
  // Closing a socket with unread bytes would throw the farewell away, so they are read first. A client that sends on
  // loses it.
  std::array<char, 4096> unread;
  for (int reads = 0; reads < 16 && recv(fd, unread.data(), unread.size(), MSG_DONTWAIT) > 0; ++reads) continue;
  close(fd);
}

void TcpListener::Admit(int listener_fd, int fd, const sockaddr_storage& peer) {
  const absl::Status admitted = LeavesKeptDescriptors(fd)
                                    ? table_->Admit(fd, peer)
                                    : NoDescriptor("too many connections; the daemon has no file descriptor for them");
  metrics_->SetConnections(table_->CountOpen());
  if (!admitted.ok()) return Refuse(fd, PeerText(peer), admitted);
  on_connection_(listener_fd, fd);
}

}  // namespace ballast
