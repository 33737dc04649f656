#include "proto/shm/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/retry_after.h"

namespace ballast {
namespace {

absl::Status SystemError(absl::string_view what, int error = errno) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(error)));
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' is no path for a Unix socket; it may have ", sizeof address.sun_path - 1, " bytes"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

const sockaddr* Plain(const sockaddr_un& address) { return reinterpret_cast<const sockaddr*>(&address); }

int OpenSocket() { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

// Signals, such as a profiler's, do not end the wait.
bool AwaitReadable(int fd, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(timeout_s);
  for (;;) {
    const double left_ms = std::chrono::duration<double, std::milli>(until - Clock::now()).count();
    pollfd waited{.fd = fd, .events = POLLIN, .revents = 0};
    const int ready = poll(&waited, 1, static_cast<int>(std::ceil(std::max(0.0, left_ms))));
    if (ready >= 0 || errno != EINTR) return ready == 1;
  }
}

constexpr size_t kMostDescriptors = 2;

struct Received {
  ssize_t bytes = 0;
  std::vector<ShmSocket> attached = {};  // descriptors, to be closed
};

// Takes over all descriptors that came with a message, of which the system may have put in more than one was asked for:
// what is aligned has room for two.
std::vector<ShmSocket> TakeDescriptors(msghdr* message) {
  std::vector<ShmSocket> taken;
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr; header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const char*>(header) + at, sizeof fd);
      taken.emplace_back(fd);
    }
  }
  return taken;
}

// One message, and the descriptors that came with it, unless some got lost.
Received Receive(int fd, void* to, size_t bytes) {
  iovec part{.iov_base = to, .iov_len = bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> room{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room.data();
  message.msg_controllen = room.size();
  Received received{.bytes = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)};
  if (received.bytes < 0) return received;
  std::vector<ShmSocket> taken = TakeDescriptors(&message);
  if ((message.msg_flags & MSG_CTRUNC) == 0) received.attached = std::move(taken);
  if ((message.msg_flags & MSG_TRUNC) != 0) received.bytes = static_cast<ssize_t>(bytes) + 1;  // longer than it may be
  return received;
}

}  // namespace

ShmSocket::ShmSocket(ShmSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
ShmSocket& ShmSocket::operator=(ShmSocket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
ShmSocket::~ShmSocket() {
  if (fd_ >= 0) close(fd_);
}

bool ShmSocket::HungUp() const {
  pollfd watched{.fd = fd_, .events = POLLRDHUP, .revents = 0};
  return poll(&watched, 1, 0) == 1;
}

absl::StatusOr<ShmSocket> ShmSocket::Connect(const std::string& path) {
  const auto address = AddressOf(path);
  if (!address.ok()) return address.status();
  ShmSocket made(OpenSocket());
  if (made.fd_ < 0) return SystemError("socket");
  if (connect(made.fd_, Plain(*address), sizeof *address) != 0) return SystemError(path);
  return made;
}

namespace {

struct Answered {
  ShmGrant grant;
  std::vector<ShmSocket> attached;
};

absl::Status RefusalOf(const ShmGrant& grant) {
  absl::Status refusal(static_cast<absl::StatusCode>(grant.code), grant.message.data());
  return grant.retry_after_ms == 0 ? refusal : WithRetryAfter(std::move(refusal), grant.retry_after_ms / 1000.0);
}

// Says hello, and waits for the grant.
template <class Hello>
absl::StatusOr<Answered> AskFor(int fd, const Hello& hello, double timeout_s) {
  if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return SystemError("the daemon's socket");
  if (!AwaitReadable(fd, timeout_s)) return absl::UnavailableError("the daemon's socket does not answer");
  ShmGrant grant;
  Received received = Receive(fd, &grant, sizeof grant);
  if (received.bytes <= 0) {
    return absl::UnavailableError(
        "the daemon closed the socket before it answered: it has just ended, or is of another version");
  }
  if (received.bytes != sizeof grant || grant.magic != ShmHello::kMagic) {
    return absl::UnavailableError("what answers at the socket is no daemon of this version");
  }
  grant.message.back() = 0;
  if (grant.code != 0) return RefusalOf(grant);
  if (received.attached.size() != 1 + grant.shape.on_gpu) {
    return absl::UnavailableError("the daemon's memory did not come with its answer");
  }
  return Answered{grant, std::move(received.attached)};
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShmSegment>> ShmSocket::Ask(const ShmHello& hello, double timeout_s) const {
  auto answered = AskFor(fd_, hello, timeout_s);
  if (!answered.ok()) return answered.status();
  if (answered->grant.shape.on_gpu != 0)
    return absl::UnavailableError("the daemon's memory is one that was not asked for");
  return ShmSegment::Map(answered->attached[0].fd(), answered->grant.shape);
}

absl::StatusOr<ShmSocket::GpuAnswer> ShmSocket::AskForGpu(const ShmGpuHello& hello, double timeout_s) const {
  auto answered = AskFor(fd_, hello, timeout_s);
  if (!answered.ok()) return answered.status();
  auto segment = ShmSegment::Map(answered->attached[0].fd(), answered->grant.shape);
  if (!segment.ok()) return segment.status();
  GpuAnswer answer{.segment = *std::move(segment), .gpu_memory = {}, .why_none = answered->grant.message.data()};
  if (answered->attached.size() > 1) answer.gpu_memory = std::move(answered->attached[1]);
  return answer;
}

absl::StatusOr<ShmSocket> ShmSocket::Listen(const std::string& path) {
  const auto address = AddressOf(path);
  if (!address.ok()) return address.status();
  ShmSocket made(OpenSocket());
  if (made.fd_ < 0) return SystemError("socket");
  struct stat found {};
  if (lstat(path.c_str(), &found) == 0) {
    if (!S_ISSOCK(found.st_mode)) return absl::AlreadyExistsError(absl::StrCat(path, " is there and is no socket"));
    if (!IsLeft(path)) return absl::AlreadyExistsError(absl::StrCat("a daemon answers at ", path));
    unlink(path.c_str());
  }
  // Nobody can connect before listen, and so none before the mode is right.
  if (bind(made.fd_, Plain(*address), sizeof *address) != 0) return SystemError(path);
  if (chmod(path.c_str(), 0600) != 0) return SystemError(path);
  if (listen(made.fd_, 64) != 0) return SystemError(path);
  return made;
}

bool ShmSocket::IsLeft(const std::string& path) {
  const auto address = AddressOf(path);
  const ShmSocket tried(OpenSocket());
  return address.ok() && connect(tried.fd_, Plain(*address), sizeof *address) != 0 && errno == ECONNREFUSED;
}

absl::StatusOr<ShmSocket> ShmSocket::Accept() const {
  ShmSocket made(accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool none_left = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  if (made.fd_ < 0 && none_left) return absl::ResourceExhaustedError("no file descriptor is left");
  if (made.fd_ < 0) return SystemError("accept");
  return made;
}

absl::StatusOr<ShmSocket::Hello> ShmSocket::ReceiveHello() const {
  ShmGpuHello hello;
  const Received received = Receive(fd_, &hello, sizeof hello);
  if (received.bytes < 0 && (errno == EAGAIN || errno == EINTR)) return absl::UnavailableError("nothing is there yet");
  if (received.bytes == sizeof(ShmHello) && hello.magic == ShmHello::kMagic) return Hello{.token = hello.token};
  if (received.bytes == sizeof hello && hello.magic == ShmGpuHello::kMagic && hello.zero == 0) {
    return Hello{.token = hello.token, .takes_gpu = true};
  }
  return absl::InvalidArgumentError("what connects is no client of this version");
}

absl::Status ShmSocket::Answer(const ShmGrant& grant, absl::Span<const int> descriptors) const {
  iovec part{.iov_base = const_cast<ShmGrant*>(&grant), .iov_len = sizeof grant};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> room{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (const size_t bytes = descriptors.size() * sizeof(int); bytes > 0) {
    message.msg_control = room.data();
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(header), descriptors.data(), bytes);
  }
  if (sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof grant) return absl::OkStatus();
  return SystemError("answering a trainer");
}

absl::StatusOr<ucred> ShmSocket::Peer() const {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return SystemError("SO_PEERCRED");
  return peer;
}

bool MayShareMemory(uid_t peer, uid_t daemon) { return peer == daemon || peer == 0; }

}  // namespace ballast
