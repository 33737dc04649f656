#include "tests/client/loopback_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

namespace ballast {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

LoopbackSocket::LoopbackSocket(int fd) : fd_(fd) {
  const int on = 1;
  if (is_open()) setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

LoopbackSocket::LoopbackSocket(LoopbackSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

LoopbackSocket& LoopbackSocket::operator=(LoopbackSocket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

LoopbackSocket LoopbackSocket::Listen() {
  LoopbackSocket made(socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in address = Loopback(0);
  if (bind(made.fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 || listen(made.fd_, 8) != 0) {
    made.Reset();
  }
  return made;
}

LoopbackSocket LoopbackSocket::ConnectTo(uint16_t port) {
  LoopbackSocket made(socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in address = Loopback(port);
  if (connect(made.fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) made.Reset();
  return made;
}

LoopbackSocket LoopbackSocket::Accept() const { return LoopbackSocket(accept(fd_, nullptr, nullptr)); }

uint16_t LoopbackSocket::port() const {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

std::string LoopbackSocket::Receive(size_t most) const {
  std::string bytes(most, '\0');
  const ssize_t got = recv(fd_, bytes.data(), bytes.size(), 0);
  bytes.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return bytes;
}

bool LoopbackSocket::Send(const std::string& bytes) const {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return false;
    sent += static_cast<size_t>(n);
  }
  return true;
}

void LoopbackSocket::HalfClose() const { shutdown(fd_, SHUT_WR); }

void LoopbackSocket::Reset() {
  if (!is_open()) return;
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close(std::exchange(fd_, -1));
}

uint16_t PortOf(const std::string& address) {
  return static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

}  // namespace ballast
