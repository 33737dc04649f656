#include "server/rpc/self_check.h"

#include <netinet/in.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "proto/tls/openssl.h"

#include "server/base/clock.h"
#include "server/base/log.h"

namespace ballast {
namespace {

absl::Status Silent(const std::string& why) {
  return absl::UnavailableError(absl::StrCat("the gRPC port does not answer: ", why));
}

socklen_t BytesOf(const sockaddr_storage& at) {
  return at.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

// What a TLS client says first.
std::string ClientHello() {
  const OpensslPtr<SSL_CTX> context(SSL_CTX_new(TLS_client_method()));
  const OpensslPtr<SSL> client(SSL_new(context.get()));
  BIO* const sent = BIO_new(BIO_s_mem());
  SSL_set_bio(client.get(), BIO_new(BIO_s_mem()), sent);  // which it owns
  SSL_connect(client.get());                              // it wants an answer next
  const char* data = nullptr;
  const auto bytes = static_cast<size_t>(BIO_get_mem_data(sent, &data));
  ERR_clear_error();
  return {data, bytes};
}

// head: of a frame. A port that is full answers with an alert.
absl::Status CheckAnswer(const std::array<char, 9>& head, bool tls) {
  constexpr char kSettings = 4, kAlertRecord = 21, kHandshakeRecord = 22;
  if (!tls) return head[3] == kSettings ? absl::OkStatus() : Silent("what answers does not speak HTTP/2");
  const bool record = (head[0] == kAlertRecord || head[0] == kHandshakeRecord) && head[1] == 3;
  return record ? absl::OkStatus() : Silent("what answers does not speak TLS");
}

}  // namespace

SelfCheck::SelfCheck(const sockaddr_storage& at, bool tls, double every_s)
    : at_(at), hello_(tls ? ClientHello() : ""), every_s_(every_s), stop_fd_(eventfd(0, EFD_CLOEXEC)), thread_([this] {
        Run();
      }) {}

void SelfCheck::Stop() {
  if (!thread_.joinable()) return;
  eventfd_write(stop_fd_, 1);
  thread_.join();
  close(stop_fd_);
}

absl::Status SelfCheck::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

void SelfCheck::Run() {
  pollfd stop{.fd = stop_fd_, .events = POLLIN, .revents = 0};
  bool answered = true;
  while (poll(&stop, 1, static_cast<int>(every_s_ * 1000)) <= 0) {
    absl::Status status = Dial();
    if (poll(&stop, 1, 0) > 0) return;  // which is why there was no answer
    if (status.ok() != std::exchange(answered, status.ok())) {
      Log(answered ? LogLevel::kInfo : LogLevel::kError, answered ? "port_answers" : "port_silent",
          answered ? "the gRPC port answers again" : "the gRPC port does not answer",
          {{"err", std::string(status.message())}});
    }
    absl::MutexLock lock(&mu_);
    status_ = std::move(status);
  }
}

absl::Status SelfCheck::Dial() const {
  const double begin_s = MonotonicSeconds();
  const int fd = socket(at_.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return Silent(std::strerror(errno));
  const absl::Cleanup closed = [fd] { close(fd); };
  if (connect(fd, reinterpret_cast<const sockaddr*>(&at_), BytesOf(at_)) != 0 && errno != EINPROGRESS) {
    return Silent(std::strerror(errno));
  }
  if (!hello_.empty()) {
    if (!Await(fd, POLLOUT, begin_s)) return Silent(absl::StrCat("no connection within ", kAnswerS, " s"));
    if (send(fd, hello_.data(), hello_.size(), MSG_NOSIGNAL) < 0) return Silent(std::strerror(errno));
  }
  std::array<char, 9> frame{};  // a frame's head; of TLS the first record, whose shortest has 7 bytes
  const size_t wanted = hello_.empty() ? frame.size() : 7;
  size_t got = 0;
  while (got < wanted) {
    if (!Await(fd, POLLIN, begin_s)) return Silent(absl::StrCat("nothing came within ", kAnswerS, " s"));
    const ssize_t more = recv(fd, frame.data() + got, wanted - got, MSG_DONTWAIT);
    if (more < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (more < 0) return Silent(std::strerror(errno));
    if (more == 0) return Silent("it closed the connection");
    got += static_cast<size_t>(more);
  }
  return CheckAnswer(frame, !hello_.empty());
}

bool SelfCheck::Await(int fd, short events, double begin_s) const {
  std::array<pollfd, 2> waited = {
      {{.fd = fd, .events = events, .revents = 0}, {.fd = stop_fd_, .events = POLLIN, .revents = 0}}};
  const double left_s = std::max(0.0, begin_s + kAnswerS - MonotonicSeconds());
  return poll(waited.data(), waited.size(), static_cast<int>(left_s * 1000)) > 0 && waited[1].revents == 0;
}

}  // namespace ballast
