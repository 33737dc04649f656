// The Unix socket over which a trainer gets its segment: type SOCK_SEQPACKET, mode 0600. The trainer sends one ShmHello
// with the token of its session. The daemon answers with one ShmGrant, with the segment's descriptor attached unless it
// refuses, and that of the GPU's memory behind it where the slots are there. After that nothing more is sent; when one side
// closes the socket, the other notices that it is gone.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shm/segment.h"

namespace ballast {

struct ShmHello {
  static constexpr std::array<char, 8> kMagic = {'B', 'a', 'l', 'l', 's', 'h', 'm', '1'};
  std::array<char, 8> magic = kMagic;
  std::array<char, 16> token = {};
};
// From a trainer on a GPU that takes slots on_gpu, and slots in the segment where it gets those. An earlier daemon closes the
// socket.
struct ShmGpuHello {
  static constexpr std::array<char, 8> kMagic = {'B', 'a', 'l', 'l', 'g', 'p', 'u', '1'};
  std::array<char, 8> magic = kMagic;
  std::array<char, 16> token = {};
  uint64_t zero = 0;
};
struct ShmGrant {
  std::array<char, 8> magic = ShmHello::kMagic;
  uint32_t code = 0;            // absl::StatusCode
  uint32_t retry_after_ms = 0;  // of a refusal: when asking again may help; 0: it does not
  ShmShape shape = {};
  // Of a refusal; of a grant that answers a ShmGpuHello with slots in the segment, why they are not on_gpu. Ends with 0.
  std::array<char, 200> message = {};
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
  struct GpuAnswer;
  absl::StatusOr<GpuAnswer> AskForGpu(const ShmGpuHello& hello, double timeout_s) const;

  // The daemon's side. Listen replaces the socket of a daemon that is gone; ALREADY_EXISTS: one answers there.
  static absl::StatusOr<ShmSocket> Listen(const std::string& path);
  static bool IsLeft(const std::string& path);  // a socket to which nobody listens any more
  absl::StatusOr<ShmSocket> Accept() const;     // UNAVAILABLE: nobody waits; RESOURCE_EXHAUSTED
  // UNAVAILABLE: it is not there yet. takes_gpu: it was a ShmGpuHello.
  struct Hello {
    std::array<char, 16> token = {};
    bool takes_gpu = false;
  };
  absl::StatusOr<Hello> ReceiveHello() const;
  // descriptors: none, the segment's, or the segment's and the GPU memory's.
  absl::Status Answer(const ShmGrant& grant, absl::Span<const int> descriptors) const;
  absl::StatusOr<ucred> Peer() const;

 private:
  int fd_ = -1;
};

struct ShmSocket::GpuAnswer {
  std::shared_ptr<ShmSegment> segment;
  ShmSocket gpu_memory;  // the descriptor of the slots' memory; none: they are in the segment
  std::string why_none;  // in words, then
};

// Whether a process of this user may have a segment: if the user is the daemon's own, or root, who may read the
// daemon's memory anyway.
bool MayShareMemory(uid_t peer, uid_t daemon);

}  // namespace ballast
