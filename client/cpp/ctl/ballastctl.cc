// The operator's program: `ballastctl --help`.
#include <grpc/support/log.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/command_line.h"

namespace {

// What was printed has gone where it was to go: to a file on a full disk it has not. Returns the exit code.
int FinishOutput(int code) {
  errno = 0;
  if (std::cout.flush()) return code;
  // It failed earlier: once more, for the reason.
  if (errno == 0 && std::fputc('\n', stdout) != EOF) std::fflush(stdout);
  std::cerr << "ballastctl: standard output: " << (errno == 0 ? "cannot be written" : std::strerror(errno))
            << std::endl;
  return code == ballast::ctl::kOk ? ballast::ctl::kRefused : code;
}

}  // namespace

int main(int argc, char** argv) {
  // Debian builds Abseil with its search for deadlocks on, which every lock of every thread pays for.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // What gRPC says of a connection that fails is said better, and once, by what the command prints.
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
  const auto environment = [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  };
  const std::vector<std::string> words(argv + 1, argv + argc);
  return FinishOutput(ballast::ctl::Main(words, environment, std::cout, std::cerr));
}
