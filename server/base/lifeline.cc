#include "server/base/lifeline.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace ballast {

Lifeline::Lifeline(int fd, std::function<void()> on_end)
    : fd_(fd), stop_fd_(eventfd(0, EFD_CLOEXEC)), on_end_(std::move(on_end)), thread_([this] { Run(); }) {}

Lifeline::~Lifeline() {
  eventfd_write(stop_fd_, 1);
  thread_.join();
  close(stop_fd_);
}

void Lifeline::Run() {
  std::array<pollfd, 2> waited = {
      {{.fd = fd_, .events = POLLIN, .revents = 0}, {.fd = stop_fd_, .events = POLLIN, .revents = 0}}};
  while (true) {
    if (poll(waited.data(), waited.size(), -1) < 0) continue;  // EINTR: the others are mistakes of this file
    if (waited[1].revents != 0) return;
    if (!Goes()) break;
  }
  on_end_();
}

bool Lifeline::Goes() const {
  std::array<char, 256> dropped;
  const ssize_t got = read(fd_, dropped.data(), dropped.size());
  return got > 0 || (got < 0 && (errno == EINTR || errno == EAGAIN));
}

}  // namespace ballast
