#include "server/ops/tls_relay.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/string_view.h"
#include "proto/tls/shown_certificate.h"

#include "server/base/clock.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr int kGlanceMs = 500;  // at the time, while there are connections

// At each handshake, so that a pair that was rotated holds for the next.
int ShowCurrent(SSL* ssl, void* certificates) {
  return Show(static_cast<const CertificateKeeper*>(certificates)->current()->own, ssl) ? 1 : 0;
}

}  // namespace

// A client and its connection to the inner port.
class TlsRelay::Link {
 public:
  Link(int client_fd, SSL_CTX* context, const sockaddr_in& inner)
      : client_fd_(client_fd), inner_(inner), ssl_(SSL_new(context)) {
    over_ = ssl_ == nullptr || SSL_set_fd(ssl_.get(), client_fd) != 1;
  }
  ~Link() {
    if (shaken_) SSL_shutdown(ssl_.get());
    ERR_clear_error();
    close(client_fd_);
    if (inner_fd_ >= 0) close(inner_fd_);
  }

  bool shaken() const { return shaken_; }
  bool over() const { return over_ || MonotonicSeconds() - begin_s_ > (shaken_ ? kMostS : kHandshakeS); }

  // What to wait for before Move can do more.
  std::array<pollfd, 2> waited() const {
    const auto in = [](bool wanted) { return static_cast<short>(wanted ? POLLIN : 0); };
    const auto out = [](bool wanted) { return static_cast<short>(wanted ? POLLOUT : 0); };
    if (!shaken_) return {{{client_fd_, static_cast<short>(in(!wants_out_) | out(wants_out_)), 0}, {-1, 0, 0}}};
    const bool reads_client = to_inner_.empty() && !client_ended_, reads_inner = to_client_.empty() && !inner_ended_;
    return {{{client_fd_, static_cast<short>(in(reads_client) | out(wants_out_)), 0},
             {inner_fd_, static_cast<short>(in(reads_inner) | out(!to_inner_.empty())), 0}}};
  }

  // Moves what can be moved without waiting.
  void Move() {
    wants_out_ = false;
    if (!shaken_) {
      shaken_ = Went(SSL_accept(ssl_.get()));
      if (!shaken_) return;
      DialInner();
    }
    while (!over_ && (ReadClient() || WriteInner() || ReadInner() || WriteClient())) continue;
    over_ = over_ || (inner_ended_ && to_client_.empty());
  }

 private:
  static constexpr size_t kPieceBytes = 16 << 10;

  void DialInner() {
    inner_fd_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const int dialled = connect(inner_fd_, reinterpret_cast<const sockaddr*>(&inner_), sizeof inner_);
    over_ = over_ || (dialled != 0 && errno != EINPROGRESS);
  }

  // Whether a call of OpenSSL did something; else what it waits for, or that the connection is over.
  bool Went(int result) {
    if (result > 0) return true;
    const int why = SSL_get_error(ssl_.get(), result);
    ERR_clear_error();
    wants_out_ = wants_out_ || why == SSL_ERROR_WANT_WRITE;
    if (why == SSL_ERROR_ZERO_RETURN && !client_ended_) {
      client_ended_ = true;
      shutdown(inner_fd_, SHUT_WR);
    } else if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) {
      over_ = true;
    }
    return false;
  }

  bool ReadClient() {
    if (!to_inner_.empty() || client_ended_) return false;
    std::array<char, kPieceBytes> piece;
    const int bytes = SSL_read(ssl_.get(), piece.data(), piece.size());
    if (!Went(bytes)) return false;
    to_inner_.assign(piece.data(), static_cast<size_t>(bytes));
    return true;
  }
  bool WriteInner() {
    if (to_inner_.empty()) return false;
    const ssize_t bytes = send(inner_fd_, to_inner_.data(), to_inner_.size(), MSG_NOSIGNAL);
    if (bytes < 0) return LaterInner();
    to_inner_.erase(0, static_cast<size_t>(bytes));
    return bytes > 0;
  }
  bool ReadInner() {
    if (!to_client_.empty() || inner_ended_) return false;
    std::array<char, kPieceBytes> piece;
    const ssize_t bytes = recv(inner_fd_, piece.data(), piece.size(), 0);
    if (bytes < 0) return LaterInner();
    inner_ended_ = bytes == 0;
    to_client_.assign(piece.data(), static_cast<size_t>(bytes));
    return bytes > 0;
  }
  bool WriteClient() {
    if (to_client_.empty()) return false;
    const int bytes = SSL_write(ssl_.get(), to_client_.data(), static_cast<int>(to_client_.size()));
    if (!Went(bytes)) return false;
    to_client_.erase(0, static_cast<size_t>(bytes));
    return true;
  }
  bool LaterInner() {
    over_ = errno != EAGAIN && errno != EINTR && errno != ENOTCONN;  // not yet connected
    return false;
  }

  const int client_fd_;
  const sockaddr_in inner_;
  int inner_fd_ = -1;  // from the end of the handshake on
  const OpensslPtr<SSL> ssl_;
  const double begin_s_ = MonotonicSeconds();
  bool shaken_ = false, client_ended_ = false, inner_ended_ = false, over_ = false;
  bool wants_out_ = false;  // OpenSSL waits until the client takes more
  std::string to_inner_, to_client_;
};

TlsRelay::TlsRelay(uint16_t inner_port, const CertificateKeeper* certificates)
    : certificates_(certificates), context_(SSL_CTX_new(TLS_server_method())) {
  inner_.sin_family = AF_INET;
  inner_.sin_port = htons(inner_port);
  inner_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  SSL_CTX_set_min_proto_version(context_.get(), TLS1_2_VERSION);
  SSL_CTX_set_mode(context_.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_cert_cb(context_.get(), ShowCurrent, const_cast<CertificateKeeper*>(certificates_));
}

absl::StatusOr<std::unique_ptr<TlsRelay>> TlsRelay::Start(const std::string& host, uint16_t port, uint16_t inner_port,
                                                          const CertificateKeeper* certificates) {
  std::unique_ptr<TlsRelay> relay(new TlsRelay(inner_port, certificates));
  RETURN_IF_ERROR(relay->Listen(host, port));
  relay->thread_ = std::thread([self = relay.get()] { self->Run(); });
  return relay;
}

TlsRelay::~TlsRelay() {
  if (thread_.joinable()) {
    eventfd_write(stop_fd_, 1);
    thread_.join();
  }
  for (const int fd : {listener_fd_, stop_fd_}) {
    if (fd >= 0) close(fd);
  }
}

absl::Status TlsRelay::Listen(const std::string& host, uint16_t port) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  if (inet_pton(AF_INET, host.c_str(), &at.sin_addr) != 1) return absl::UnavailableError("the host is no IPv4 address");
  const int on = 1;
  socklen_t bytes = sizeof at;
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  listener_fd_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  if (listener_fd_ < 0 || stop_fd_ < 0 || setsockopt(listener_fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(listener_fd_, address, bytes) != 0 || listen(listener_fd_, SOMAXCONN) != 0 ||
      getsockname(listener_fd_, address, &bytes) != 0) {
    return absl::UnavailableError(std::strerror(errno));
  }
  port_ = ntohs(at.sin_port);
  return absl::OkStatus();
}

void TlsRelay::Run() {
  std::vector<pollfd> waited;
  while (true) {
    waited = {{stop_fd_, POLLIN, 0}, {links_.size() < kMost || Idle() != links_.end() ? listener_fd_ : -1, POLLIN, 0}};
    for (const auto& link : links_) {
      for (const pollfd& each : link->waited()) waited.push_back(each);
    }
    poll(waited.data(), waited.size(), links_.empty() ? -1 : kGlanceMs);
    if (waited[0].revents != 0) break;
    if (waited[1].revents != 0) Accept();
    Move();
  }
  links_.clear();
}

std::vector<std::unique_ptr<TlsRelay::Link>>::iterator TlsRelay::Idle() {
  return std::find_if(links_.begin(), links_.end(), [](const auto& link) { return !link->shaken(); });
}

void TlsRelay::Accept() {
  if (links_.size() >= kMost) links_.erase(Idle());
  const int fd = accept4(listener_fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd >= 0) links_.push_back(std::make_unique<Link>(fd, context_.get(), inner_));
  if (fd >= 0 || (errno != EMFILE && errno != ENFILE)) return;
  pollfd stop{.fd = stop_fd_, .events = POLLIN, .revents = 0};
  poll(&stop, 1, kGlanceMs);  // who waits stays in the queue, which would have poll() return at once
}

void TlsRelay::Move() {
  for (const auto& link : links_) link->Move();
  std::erase_if(links_, [](const auto& link) { return link->over(); });
}

}  // namespace ballast
