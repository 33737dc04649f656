#include "server/rpc/self_check.h"

#include <netinet/in.h>
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

}  // namespace

SelfCheck::SelfCheck(const sockaddr_storage& at, double every_s)
    : at_(at), every_s_(every_s), stop_fd_(eventfd(0, EFD_CLOEXEC)), thread_([this] { Run(); }) {}

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
  std::array<char, 9> frame{};  // a frame's head
  size_t got = 0;
  while (got < frame.size()) {
    if (!Await(fd, POLLIN, begin_s)) return Silent(absl::StrCat("nothing came within ", kAnswerS, " s"));
    const ssize_t more = recv(fd, frame.data() + got, frame.size() - got, MSG_DONTWAIT);
    if (more < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (more < 0) return Silent(std::strerror(errno));
    if (more == 0) return Silent("it closed the connection");
    got += static_cast<size_t>(more);
  }
  constexpr char kSettings = 4;
  return frame[3] == kSettings ? absl::OkStatus() : Silent("what answers does not speak HTTP/2");
}

bool SelfCheck::Await(int fd, short events, double begin_s) const {
  std::array<pollfd, 2> waited = {
      {{.fd = fd, .events = events, .revents = 0}, {.fd = stop_fd_, .events = POLLIN, .revents = 0}}};
  const double left_s = std::max(0.0, begin_s + kAnswerS - MonotonicSeconds());
  return poll(waited.data(), waited.size(), static_cast<int>(left_s * 1000)) > 0 && waited[1].revents == 0;
}

}  // namespace ballast
