// What is so in a fork of the test.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace ballast {

// Whether it holds in a fork, which ends then.
inline bool HoldsInFork(const std::function<bool()>& holds) {
  constexpr unsigned kLongestS = 60;  // of what would never end
  const pid_t child = fork();
  if (child == 0) {
    alarm(kLongestS);
    _exit(holds() ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace ballast
