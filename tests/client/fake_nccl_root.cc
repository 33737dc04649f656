#include "tests/client/fake_nccl_root.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <random>

namespace ballast {
namespace {

struct AbstractName {  // no file
  explicit AbstractName(const std::string& name) {
    address.sun_family = AF_UNIX;
    const size_t kept = std::min(name.size(), sizeof(address.sun_path) - 1);
    std::memcpy(address.sun_path + 1, name.data(), kept);
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + kept);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
  sockaddr_un address = {};
  socklen_t bytes = 0;
};

int Listen(const std::string& name) {
  const int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const AbstractName at(name);
  if (bind(listening, at.get(), at.bytes) != 0 || listen(listening, 16) != 0) abort();  // a test that cannot be
  return listening;
}

// A message of one byte that has room for a descriptor.
struct Passing {
  Passing() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  char byte = 'd';
  iovec data = {&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
};

void Pass(int to, int fd) {
  Passing passing;
  cmsghdr* const header = CMSG_FIRSTHDR(&passing.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  (void)sendmsg(to, &passing.message, MSG_NOSIGNAL);
}

}  // namespace

FakeNcclRoot::FakeNcclRoot()
    : name_("ballast-fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(std::random_device()()) + "-" +
            std::to_string(std::random_device()())),
      listening_(Listen(name_)),
      thread_([this] { Run(); }) {}

FakeNcclRoot::~FakeNcclRoot() {
  shutdown(listening_, SHUT_RDWR);
  thread_.join();
  close(listening_);
}

void FakeNcclRoot::Run() const {
  std::array<int, 2> ends = {-1, -1};
  while (ends[0] < 0 || ends[1] < 0) {
    const int came = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    if (came < 0) break;
    unsigned char rank = 2;
    if (recv(came, &rank, 1, 0) != 1 || rank > 1 || ends[rank] >= 0) {
      close(came);
    } else {
      ends[rank] = came;
    }
  }
  std::array<int, 2> pair = {-1, -1};
  if (ends[0] >= 0 && ends[1] >= 0 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) == 0) {
    for (size_t i = 0; i < 2; ++i) Pass(ends[i], pair[i]);
  }
  for (const int fd : {ends[0], ends[1], pair[0], pair[1]}) {
    if (fd >= 0) close(fd);
  }
}

int FakeNcclRoot::Connect(const std::string& name, int rank) {
  const int root = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const AbstractName at(name);
  const auto own = static_cast<unsigned char>(rank);
  if (connect(root, at.get(), at.bytes) == 0 && send(root, &own, 1, MSG_NOSIGNAL) == 1) return root;
  close(root);
  return -1;
}

int FakeNcclRoot::Await(int root) {
  Passing passing;
  if (recvmsg(root, &passing.message, MSG_CMSG_CLOEXEC) != 1) return -1;
  const cmsghdr* const header = CMSG_FIRSTHDR(&passing.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return -1;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return fd;
}

}  // namespace ballast
