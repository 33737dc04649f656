#include "server/base/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ballast {

uint64_t MostDescriptors() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

uint64_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const uint64_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
  // If the system refuses, the limit stays, and MostDescriptors says so.
  static_cast<void>(setrlimit(RLIMIT_NOFILE, &limit));
  return before;
}

void OpenStandardDescriptors() {
  // open gives the lowest number that is free: this one, as those below it are open.
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) open("/dev/null", O_RDWR);
  }
}

bool LeavesKeptDescriptors(int fd) { return static_cast<uint64_t>(fd) + kKeptDescriptors < MostDescriptors(); }

bool SpareDescriptor::Use(const std::function<void()>& act) {
  if (fd_ < 0) Take();
  if (fd_ < 0) return false;
  LetGo();
  act();
  Take();
  return true;
}

void SpareDescriptor::Take() { fd_ = open("/dev/null", O_RDONLY | O_CLOEXEC); }

void SpareDescriptor::LetGo() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

}  // namespace ballast
