// Runs a program to its end: without a shell, in a process group of its own, with nothing of the daemon's but its
// environment and its working folder. No descriptor is inherited, and no signal mask; stdin and stdout are /dev/null.
//
//   const ChildEnd end = RunChild({.command = {"/usr/bin/rclone", "copy", folder, "remote:x"}, .timeout_s = 600},
//                                 [&] { return stopping.load(); });
//   if (!end.ok()) Log(..., end.ToString(), end.said)
//
// Waits for the program, on the caller's thread; thread-safe. When the program has ended, so has its whole group.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace ballast {

struct ChildOptions {
  std::vector<std::string> command;  // the program's absolute path, then its arguments
  double timeout_s = 600;            // then its group gets SIGTERM
  double grace_s = 10;               // after SIGTERM, until SIGKILL
  size_t most_said = 2000;           // bytes of the end of its stderr that are kept
};

struct ChildEnd {
  enum class How { kExited, kSignaled, kTimedOut, kStopped, kNotStarted };
  How how = How::kNotStarted;
  int code = 0;           // exit code, signal, or errno
  std::string said = {};  // the end of its stderr, of UTF-8 as far as it was
  double seconds = 0;

  bool ok() const { return how == How::kExited && code == 0; }
  // "exit code 3", "it was ended after 600 s": for people.
  std::string ToString() const;
};

// `stopped` is asked several times a second: once it says so, the program is ended as by a timeout.
ChildEnd RunChild(const ChildOptions& options, absl::FunctionRef<bool()> stopped);

// Whether that file is a program that this process may run. NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION: it is no
// file.
absl::Status CheckProgram(const std::string& path);

}  // namespace ballast
