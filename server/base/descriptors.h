// The process's file descriptors. What comes from outside takes one each, so it is admitted only while some are left
// for the daemon's own use: its HTTP port, its memory files, its look at itself. Thread-safe, but for SpareDescriptor.
#pragma once

#include <cstdint>
#include <functional>

namespace ballast {

// Kept for the daemon's own use: 80 connections of HTTP (OpsHttp's threads and queue), 20 for files and self-checks.
inline constexpr uint64_t kKeptDescriptors = 100;
// With less a daemon does not start.
inline constexpr uint64_t kLeastDescriptors = 128;

// How many the process may have open (the soft limit of RLIMIT_NOFILE).
uint64_t MostDescriptors();
// Raises the soft limit to the hard one; returns the soft limit before that.
uint64_t RaiseDescriptorLimit();
// Whether a descriptor just given out for what comes from outside leaves kKeptDescriptors: the system gives out the
// lowest free number, so as many are open as its number says.
bool LeavesKeptDescriptors(int fd);

// One descriptor that is held to be let go of when there are no others. One thread.
class SpareDescriptor {
 public:
  SpareDescriptor() { Take(); }
  ~SpareDescriptor() { LetGo(); }
  SpareDescriptor(const SpareDescriptor&) = delete;
  SpareDescriptor& operator=(const SpareDescriptor&) = delete;

  // Lets go of it, acts, and takes it back. False, and nothing done: it could not be taken back the last time, nor now.
  bool Use(const std::function<void()>& act);

 private:
  void Take();
  void LetGo();
  int fd_ = -1;
};

}  // namespace ballast
