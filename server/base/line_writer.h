// Lines to a descriptor that somebody may not read: a stopped tee, a terminal after Ctrl-S, a full pipe. A line is waited
// for once and briefly; then it is lost, and so are those after it, at once, until the descriptor takes some again. The
// first line it takes then follows a note of how many were lost. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class LineWriter {
 public:
  static constexpr double kPatienceS = 0.1;
  using Note = std::function<std::string(uint64_t lost)>;  // a line, "\n" included

  // The descriptor stays the caller's, and blocks or not as it did: others may write to what it is of. own: the writer opens
  // the pipe or terminal once more for itself, where the system allows that; a write to it then never waits.
  LineWriter(int fd, bool own, Note note);
  ~LineWriter();
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // The line ends with "\n". In one piece, so that the lines of several processes on one pipe stay whole, where the system
  // writes it so.
  void Write(std::string_view line);

 private:
  // Returns whether all of it was taken.
  bool Put(std::string_view text, double patience_s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Await(double left_s) const;

  const int fd_;
  const int own_;         // -1: none
  const bool may_block_;  // a write of more than poll has promised
  const Note note_;
  absl::Mutex mu_;
  uint64_t lost_ ABSL_GUARDED_BY(mu_) = 0;
  bool cut_ ABSL_GUARDED_BY(mu_) = false;  // a line was taken in part
};

}  // namespace ballast
