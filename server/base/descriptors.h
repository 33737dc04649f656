// The process's file descriptors. Each connection from outside takes one, so it is admitted only while some are left
// for the daemon's own use: its HTTP port, its memory files, its self-check. Thread-safe, except SpareDescriptor.
#pragma once

#include <cstdint>
#include <functional>

namespace ballast {

// Kept for the daemon's own use: 80 connections of HTTP (OpsHttp's threads and queue), 20 for files and self-checks.
inline constexpr uint64_t kKeptDescriptors = 100;
// With fewer, a daemon does not start.
inline constexpr uint64_t kLeastDescriptors = 128;

// Opens /dev/null as those of stdin, stdout and stderr that are closed: else the next file that is opened would get what is
// written to them. First thing in the process.
void OpenStandardDescriptors();
// How many the process may have open (the soft limit of RLIMIT_NOFILE).
uint64_t MostDescriptors();
// Raises the soft limit to the hard one; returns the soft limit before that.
uint64_t RaiseDescriptorLimit();
// Whether kKeptDescriptors are still free after `fd` was given out for a connection from outside. The system gives out
// the lowest free number, so at least as many are open as that number says.
bool LeavesKeptDescriptors(int fd);

// One descriptor, held so that it can be let go of when there are no others. For one thread.
class SpareDescriptor {
 public:
  SpareDescriptor() { Take(); }
  ~SpareDescriptor() { LetGo(); }
  SpareDescriptor(const SpareDescriptor&) = delete;
  SpareDescriptor& operator=(const SpareDescriptor&) = delete;

  // Lets go of the descriptor, acts, and takes it back. False, and nothing is done: it could not be taken back the last
  // time, nor now.
  bool Use(const std::function<void()>& act);

 private:
  void Take();
  void LetGo();
  int fd_ = -1;
};

}  // namespace ballast
