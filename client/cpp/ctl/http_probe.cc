#include "client/cpp/ctl/http_probe.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ballast::ctl {
namespace {

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

absl::Status Lost(const std::string& address, const std::string& why) {
  return absl::UnavailableError(absl::StrCat(address, ": ", why));
}

bool Await(int fd, short events, double timeout_s) {
  pollfd waited{.fd = fd, .events = events, .revents = 0};
  return poll(&waited, 1, static_cast<int>(timeout_s * 1000)) == 1;
}

absl::Status Connect(const Socket& socket, const addrinfo& to, const std::string& address, double timeout_s) {
  if (socket.fd() < 0) return Lost(address, std::strerror(errno));
  if (connect(socket.fd(), to.ai_addr, to.ai_addrlen) == 0) return absl::OkStatus();
  if (errno != EINPROGRESS) return Lost(address, std::strerror(errno));
  if (!Await(socket.fd(), POLLOUT, timeout_s)) return Lost(address, "no answer");
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0 ? absl::OkStatus() : Lost(address, std::strerror(error));
}

absl::StatusOr<HttpAnswer> Ask(const Socket& socket, const std::string& address, const std::string& path,
                               double timeout_s) {
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", address, "\r\n\r\n");
  if (send(socket.fd(), request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) {
    return Lost(address, std::strerror(errno));
  }
  constexpr size_t kStatusLine = sizeof("HTTP/1.1 200") - 1, kMostBytes = 64 << 20;
  std::string answer;
  while (answer.size() < kMostBytes && Await(socket.fd(), POLLIN, timeout_s)) {
    char buffer[16384];
    const ssize_t got = recv(socket.fd(), buffer, sizeof(buffer), 0);
    if (got <= 0) break;
    answer.append(buffer, static_cast<size_t>(got));
  }
  int code = 0;
  if (answer.size() < kStatusLine || !answer.starts_with("HTTP/1.") || !absl::SimpleAtoi(answer.substr(9, 3), &code)) {
    return Lost(address, "no HTTP answer");
  }
  const size_t head = answer.find("\r\n\r\n");
  return HttpAnswer{.status = code, .body = head == std::string::npos ? "" : answer.substr(head + 4)};
}

}  // namespace

absl::StatusOr<HttpAnswer> HttpGet(const std::string& address, const std::string& path, double timeout_s) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return absl::InvalidArgumentError(absl::StrCat(address, ": no port"));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  std::string host = address.substr(0, colon);
  if (host.starts_with('[')) host = host.substr(1, host.size() - 2);
  if (const int error = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found); error != 0) {
    return Lost(address, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  const Socket socket(::socket(found->ai_family, found->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (auto s = Connect(socket, *found, address, timeout_s); !s.ok()) return s;
  return Ask(socket, address, path, timeout_s);
}

}  // namespace ballast::ctl
