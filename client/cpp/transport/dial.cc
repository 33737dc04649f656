#include "client/cpp/transport/dial.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// OpenSSL writes to a socket whose other end is gone as the system has it by default, with a signal that ends the process.
// While one of these lives, this thread gets none.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~WithoutSigpipe() {
    const timespec at_once{};
    if (!was_pending_) sigtimedwait(&sigpipe_, nullptr, &at_once);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_ = false;
};

}  // namespace

bool IsIpAddress(const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> address;
  return inet_pton(AF_INET, host.c_str(), address.data()) == 1 ||
         inet_pton(AF_INET6, host.c_str(), address.data()) == 1;
}

absl::StatusOr<HostAndPort> SplitAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return absl::InvalidArgumentError(absl::StrCat(address, ": no port"));
  std::string host = address.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  return HostAndPort{.host = std::move(host), .port = address.substr(colon + 1)};
}

absl::StatusOr<std::unique_ptr<Dial>> Dial::Tcp(const std::string& address, double timeout_s) {
  const auto lost = [&](const char* why) { return absl::UnavailableError(absl::StrCat(address, ": ", why)); };
  const auto at = SplitAddress(address);
  if (!at.ok()) return at.status();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(at->host.c_str(), at->port.c_str(), &hints, &found); error != 0) {
    return lost(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  int error = 0;
  for (const addrinfo* to = found; to != nullptr; to = to->ai_next) {
    const int fd = socket(to->ai_family, to->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return lost(std::strerror(errno));
    std::unique_ptr<Dial> dial(new Dial(fd, timeout_s));
    dial->BeginCall();
    error = connect(fd, to->ai_addr, to->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      if (!dial->Await(POLLOUT)) return lost("no answer");
      socklen_t size = sizeof(error);
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) return dial;
  }
  return lost(std::strerror(error));
}

Dial::~Dial() {
  const WithoutSigpipe quiet;
  if (ssl_ != nullptr && ssl_error_ == SSL_ERROR_NONE) SSL_shutdown(ssl_.get());
  ERR_clear_error();
  close(fd_);
}

bool Dial::Await(short events) const {
  for (;;) {
    pollfd waited{.fd = fd_, .events = events, .revents = 0};
    const int64_t left_ms = absl::ToInt64Milliseconds(give_up_ - SteadyNow());
    if (left_ms <= 0) return false;
    const int ready = poll(&waited, 1, static_cast<int>(left_ms));
    if (ready >= 0 || errno != EINTR) return ready == 1;
  }
}

bool Dial::AwaitSsl(int result) {
  ssl_error_ = SSL_get_error(ssl_.get(), result);
  if (ssl_error_ == SSL_ERROR_WANT_READ) return Await(POLLIN);
  return ssl_error_ == SSL_ERROR_WANT_WRITE && Await(POLLOUT);
}

int Dial::Shake(OpensslPtr<SSL> ssl) {
  const WithoutSigpipe quiet;
  BeginCall();
  ssl_ = std::move(ssl);
  ERR_clear_error();
  SSL_set_fd(ssl_.get(), fd_);
  while (AwaitSsl(SSL_connect(ssl_.get()))) continue;
  return ssl_error_;
}

bool Dial::Write(absl::string_view bytes) {
  const WithoutSigpipe quiet;
  BeginCall();
  const auto length = static_cast<int>(bytes.size());
  if (ssl_ == nullptr) return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == length;
  while (AwaitSsl(SSL_write(ssl_.get(), bytes.data(), length))) continue;
  return ssl_error_ == SSL_ERROR_NONE;
}

std::string Dial::Read(size_t most_bytes) {
  const WithoutSigpipe quiet;
  BeginCall();
  std::string bytes(most_bytes, '\0');
  ssize_t got = 0;
  if (ssl_ == nullptr) {
    got = Await(POLLIN) ? recv(fd_, bytes.data(), bytes.size(), 0) : 0;
  } else {
    do got = SSL_read(ssl_.get(), bytes.data(), static_cast<int>(bytes.size()));
    while (AwaitSsl(static_cast<int>(got)));
  }
  bytes.resize(static_cast<size_t>(got > 0 ? got : 0));
  return bytes;
}

OpensslPtr<SSL> ClientSsl(const std::string& authorities, const std::string& host) {
  const OpensslPtr<SSL_CTX> context(SSL_CTX_new(TLS_client_method()));
  const OpensslPtr<BIO> pem = BioOf(authorities);
  while (X509* next = PEM_read_bio_X509(pem.get(), nullptr, nullptr, nullptr)) {
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context.get()), next);
    X509_free(next);
  }
  ERR_clear_error();
  SSL_CTX_set_verify(context.get(), authorities.empty() ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, nullptr);
  OpensslPtr<SSL> ssl(SSL_new(context.get()));
  if (IsIpAddress(host)) {
    X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), host.c_str());
  } else {
    SSL_set1_host(ssl.get(), host.c_str());
    SSL_set_tlsext_host_name(ssl.get(), host.c_str());
  }
  return ssl;
}

}  // namespace ballast
