// The operator's program: `ballastctl --help`.
#include <grpc/support/log.h>

#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "client/cpp/ctl/command_line.h"

int main(int argc, char** argv) {
  // Debian builds Abseil with its search for deadlocks on, which every lock of every thread pays for.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // What gRPC says of a connection that fails is said better, and once, by what the command prints.
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
  const auto environment = [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  };
  return ballast::ctl::Main(std::vector<std::string>(argv + 1, argv + argc), environment, std::cout, std::cerr);
}
