// A descriptor whose other end another process holds, such as a pipe at standard input: it tells when that process is
// gone, whatever way it ended, since the kernel then closes the other end. What is written into it is read and dropped.
// One thread of its own, asleep until then.
#pragma once

#include <functional>
#include <thread>

namespace ballast {

class Lifeline {
 public:
  // on_end: once, on the thread of the lifeline: nobody holds the other end any more, or `fd` cannot be read. A regular
  // file, and /dev/null, end at once. `fd` stays the caller's, and open as long as this.
  Lifeline(int fd, std::function<void()> on_end);
  ~Lifeline();  // waits for a call that is under way; none comes later
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

 private:
  void Run();
  // Reads and drops what there is. False: it has ended.
  bool Goes() const;

  const int fd_;
  const int stop_fd_;  // an eventfd
  const std::function<void()> on_end_;
  std::thread thread_;
};

}  // namespace ballast
