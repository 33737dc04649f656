// Sockets of this machine for proxies between a client and a daemon.
#pragma once

#include <cstdint>
#include <string>

namespace ballast {

// Owns a TCP socket. Movable.
class LoopbackSocket {
 public:
  LoopbackSocket() = default;
  explicit LoopbackSocket(int fd);  // sends at once what is written
  static LoopbackSocket Listen();
  static LoopbackSocket ConnectTo(uint16_t port);  // closed, when nobody listens
  LoopbackSocket(LoopbackSocket&& other) noexcept;
  LoopbackSocket& operator=(LoopbackSocket&& other) noexcept;
  ~LoopbackSocket() { Reset(); }

  LoopbackSocket Accept() const;
  uint16_t port() const;
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

  // Waits for bytes and returns at most `most` of them; empty: the other end is gone.
  std::string Receive(size_t most) const;
  // False: the other end is gone.
  bool Send(const std::string& bytes) const;
  // Nothing more will be sent.
  void HalfClose() const;
  // Closes with a reset.
  void Reset();

 private:
  int fd_ = -1;
};

// The port in "host:port".
uint16_t PortOf(const std::string& address);

}  // namespace ballast
