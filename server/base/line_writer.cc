#include "server/base/line_writer.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"

namespace ballast {
namespace {

bool IsFile(int fd) {
  struct stat found {};
  return fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

// O_NONBLOCK is of what was opened, which other processes share: so it is opened anew.
int OpenAnew(int fd) {
  struct stat found {};
  if (fstat(fd, &found) != 0 || !(S_ISFIFO(found.st_mode) || isatty(fd) != 0)) return -1;
  return open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
}

}  // namespace

LineWriter::LineWriter(int fd, bool own, Note note)
    : fd_(fd), own_(own ? OpenAnew(fd) : -1), may_block_(own_ < 0 && !IsFile(fd)), note_(std::move(note)) {}

LineWriter::~LineWriter() {
  if (own_ >= 0) close(own_);
}

void LineWriter::Write(std::string_view line) {
  absl::MutexLock lock(&mu_);
  const double patience_s = lost_ > 0 ? 0 : kPatienceS;
  std::string text = cut_ ? "\n" : "";
  if (lost_ > 0) text += note_(lost_);
  text += line;
  lost_ = Put(text, patience_s) ? 0 : lost_ + 1;
}

bool LineWriter::Put(std::string_view text, double patience_s) {
  const double until_s = MonotonicSeconds() + patience_s;
  while (!text.empty()) {
    const double left_s = std::max(0.0, until_s - MonotonicSeconds());
    if (may_block_ && !Await(left_s)) return false;
    // Where poll says that a pipe takes something, it takes so much.
    const size_t bytes = may_block_ ? std::min<size_t>(text.size(), PIPE_BUF) : text.size();
    const ssize_t written = write(own_ >= 0 ? own_ : fd_, text.data(), bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN && left_s > 0 && Await(left_s)) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
    cut_ = !text.empty();
  }
  return true;
}

bool LineWriter::Await(double left_s) const {
  pollfd waited{.fd = own_ >= 0 ? own_ : fd_, .events = POLLOUT, .revents = 0};
  int ready = 0;
  do {
    ready = poll(&waited, 1, static_cast<int>(std::ceil(left_s * 1000)));
  } while (ready < 0 && errno == EINTR);
  return ready == 1 && (waited.revents & POLLOUT) != 0;
}

}  // namespace ballast
