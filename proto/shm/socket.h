// The Unix socket over which a trainer gets its segment: type SOCK_SEQPACKET, mode 0600. The trainer sends one ShmHello
// with the token of its session. The daemon answers with one ShmGrant, with the segment's descriptor attached unless it
// refuses. After that nothing more is sent; when one side closes the socket, the other notices that it is gone.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/shm/segment.h"

namespace ballast {

struct ShmHello {
  static constexpr std::array<char, 8> kMagic = {'B', 'a', 'l', 'l', 's', 'h', 'm', '1'};
  std::array<char, 8> magic = kMagic;
  std::array<char, 16> token = {};
};
struct ShmGrant {
  std::array<char, 8> magic = ShmHello::kMagic;
  uint32_t code = 0;  // absl::StatusCode
  uint32_t zero = 0;
  ShmShape shape = {};
  std::array<char, 200> message = {};  // of a refusal; ends with 0
};

// An owned descriptor; movable.
class ShmSocket {
 public:
  ShmSocket() = default;
  explicit ShmSocket(int fd) : fd_(fd) {}
  ShmSocket(ShmSocket&& other) noexcept;
  ShmSocket& operator=(ShmSocket&& other) noexcept;
  ~ShmSocket();

  int fd() const { return fd_; }
  // The other end is closed, or its process gone.
  bool HungUp() const;
  // Both ends see the end. Any thread.
  void Shutdown() const { shutdown(fd_, SHUT_RDWR); }

  // The trainer's side. The status is the daemon's refusal, or says what keeps the two apart.
  static absl::StatusOr<ShmSocket> Connect(const std::string& path);
  absl::StatusOr<std::shared_ptr<ShmSegment>> Ask(const ShmHello& hello, double timeout_s) const;

  // The daemon's side. Listen replaces the socket of a daemon that is gone; ALREADY_EXISTS: one answers there.
  static absl::StatusOr<ShmSocket> Listen(const std::string& path);
  static bool IsLeft(const std::string& path);                       // a socket to which nobody listens any more
  absl::StatusOr<ShmSocket> Accept() const;                          // UNAVAILABLE: nobody waits; RESOURCE_EXHAUSTED
  absl::StatusOr<ShmHello> ReceiveHello() const;                     // UNAVAILABLE: it is not there yet
  absl::Status Answer(const ShmGrant& grant, int segment_fd) const;  // -1: none
  absl::StatusOr<ucred> Peer() const;

 private:
  int fd_ = -1;
};

// Whether a process of this user may have a segment: if the user is the daemon's own, or root, who may read the
// daemon's memory anyway.
bool MayShareMemory(uid_t peer, uid_t daemon);

}  // namespace ballast
