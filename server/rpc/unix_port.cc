#include "server/rpc/unix_port.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ballast {
namespace {

// errno of the call, or 0. A backlog that is full is a daemon's, too.
int CallAt(int (*call)(int, const sockaddr*, socklen_t), const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return ENAMETOOLONG;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  const int error = call(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
  close(fd);
  return error;
}

// What keeps a socket from being made at the path; empty: nothing.
std::string InTheWay(const std::string& path) {
  struct stat found {};
  if (lstat(path.c_str(), &found) == 0) {
    if (!S_ISSOCK(found.st_mode)) return "a file is there, which is no socket";
    const int error = CallAt(connect, path);
    if (error == 0 || error == EAGAIN) return "a daemon answers there";
    if (error != ECONNREFUSED) return std::strerror(error);
    if (unlink(path.c_str()) != 0) return std::strerror(errno);
  }
  const int error = CallAt(bind, path);
  if (error == 0) unlink(path.c_str());
  return error == 0 ? "" : std::strerror(error);
}

}  // namespace

absl::Status ReadyUnixPort(const std::string& listen) {
  const std::string path(absl::StripPrefix(listen, "unix:"));
  const std::string why = InTheWay(path);
  if (why.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", listen, ": ", why, "; choose another path with listen, or make room there"));
}

}  // namespace ballast
