#include "server/base/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "server/base/clock.h"
#include "server/base/utf8.h"

extern char** environ;

namespace ballast {
namespace {

constexpr int kLookEveryMs = 50;
// A process that hangs in the kernel does not die of SIGKILL: whoever stops does not wait for it any longer.
constexpr double kGivenUpAfterS = 5;

// The last bytes of what is written into a pipe.
class Tail {
 public:
  explicit Tail(size_t most) : most_(most) {}
  ~Tail() {
    CloseEnd(&read_);
    CloseEnd(&write_);
  }
  Tail(const Tail&) = delete;
  Tail& operator=(const Tail&) = delete;

  // errno, or 0.
  int Open() {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) return errno;
    read_ = ends[0];
    write_ = ends[1];
    return fcntl(read_, F_SETFL, O_NONBLOCK) == 0 ? 0 : errno;
  }
  int write_end() const { return write_; }
  void CloseWriteEnd() { CloseEnd(&write_); }

  // Waits a moment for more of it.
  void Wait() {
    pollfd waited{.fd = read_, .events = POLLIN, .revents = 0};
    poll(&waited, read_ >= 0 ? 1 : 0, kLookEveryMs);
    Read();
  }
  // What is there now.
  void Read() {
    std::array<char, 4096> block{};
    while (read_ >= 0) {
      const ssize_t got = read(read_, block.data(), block.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return;
      if (got <= 0) return CloseEnd(&read_);
      text_.append(block.data(), static_cast<size_t>(got));
      if (text_.size() > most_) text_.erase(0, text_.size() - most_);
    }
  }
  std::string text() const { return ValidUtf8(text_); }

 private:
  static void CloseEnd(int* fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }

  const size_t most_;
  int read_ = -1, write_ = -1;
  std::string text_;
};

// posix_spawn's two objects, and what they are told.
class SpawnOrder {
 public:
  SpawnOrder() {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
  }
  ~SpawnOrder() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  SpawnOrder(const SpawnOrder&) = delete;
  SpawnOrder& operator=(const SpawnOrder&) = delete;

  // errno, or 0.
  int Spawn(const std::vector<std::string>& command, int stderr_fd, pid_t* pid) {
    posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions_, stderr_fd, STDERR_FILENO);
    posix_spawn_file_actions_addclosefrom_np(&actions_, STDERR_FILENO + 1);
    sigset_t none, ours;
    sigemptyset(&none);
    sigemptyset(&ours);
    // What the daemon, or gRPC, ignores or handles.
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGXFSZ, SIGCHLD}) sigaddset(&ours, signal);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &ours);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    std::vector<char*> arguments;
    for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    return posix_spawn(pid, arguments[0], &actions_, &attributes_, arguments.data(), environ);
  }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

// Whether it has ended. It stays a zombie, whose number, and so its group's, nobody else gets.
bool HasEnded(pid_t pid) {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) return errno != EINTR;
  return info.si_pid == pid;
}

void Reap(pid_t pid, ChildEnd* end) {
  kill(-pid, SIGKILL);  // what it has left running
  int status = 0;
  pid_t reaped = 0;
  do {
    reaped = waitpid(pid, &status, 0);
  } while (reaped < 0 && errno == EINTR);
  if (reaped < 0) {  // somebody else has: how it ended is not known
    end->how = ChildEnd::How::kNotStarted;
    end->code = errno;
    return;
  }
  if (end->how == ChildEnd::How::kTimedOut || end->how == ChildEnd::How::kStopped) return;
  end->how = WIFSIGNALED(status) ? ChildEnd::How::kSignaled : ChildEnd::How::kExited;
  end->code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

std::string ChildEnd::ToString() const {
  switch (how) {
    case How::kExited:
      return absl::StrCat("exit code ", code);
    case How::kSignaled:
      return absl::StrCat("signal ", code, " (", strsignal(code), ")");
    case How::kTimedOut:
      return absl::StrFormat("it was ended after %.0f s, its time limit", seconds);
    case How::kStopped:
      return absl::StrFormat("it was ended after %.1f s, for it is not wanted any more", seconds);
    case How::kNotStarted:
      return absl::StrCat("it could not be started: ", std::strerror(code));
  }
  return "";
}

ChildEnd RunChild(const ChildOptions& options, absl::FunctionRef<bool()> stopped) {
  ChildEnd end;
  Tail tail(options.most_said);
  pid_t pid = 0;
  end.code = tail.Open();
  if (end.code == 0) end.code = SpawnOrder().Spawn(options.command, tail.write_end(), &pid);
  if (end.code != 0) return end;
  tail.CloseWriteEnd();
  end.how = ChildEnd::How::kExited;
  const double began_s = MonotonicSeconds();
  double kill_at_s = std::numeric_limits<double>::infinity(), given_up_at_s = kill_at_s;
  while (!HasEnded(pid)) {
    tail.Wait();
    const double now_s = MonotonicSeconds();
    const bool stops = stopped(), late = now_s >= began_s + options.timeout_s;
    if (end.how == ChildEnd::How::kExited && (stops || late)) {
      end.how = stops ? ChildEnd::How::kStopped : ChildEnd::How::kTimedOut;
      kill(-pid, SIGTERM);
      kill_at_s = now_s + options.grace_s;
    }
    if (now_s >= kill_at_s) {
      kill(-pid, SIGKILL);
      given_up_at_s = std::min(given_up_at_s, now_s + kGivenUpAfterS);
    }
    if (stops && now_s >= given_up_at_s) break;
  }
  end.seconds = MonotonicSeconds() - began_s;
  if (HasEnded(pid)) Reap(pid, &end);
  tail.Read();
  end.said = tail.text();
  return end;
}

absl::Status CheckProgram(const std::string& path) {
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) {
    const std::string why = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == EACCES ? absl::PermissionDeniedError(why) : absl::NotFoundError(why);
  }
  if (!S_ISREG(found.st_mode)) return absl::FailedPreconditionError(absl::StrCat(path, " is no file"));
  if (access(path.c_str(), X_OK) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat(path, " is no program that the daemon's user may run: ", std::strerror(errno)));
}

}  // namespace ballast
