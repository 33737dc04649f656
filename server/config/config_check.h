// What a configuration must satisfy beyond the types of its values. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/config/config.h"

namespace ballast {

struct ConfigError {
  std::string path;     // of the key at fault
  std::string problem;  // got, wanted and the fix
};

// The first thing that is wrong, in the order of the schema; empty path: nothing is.
ConfigError CheckConfig(const Config& config);
// What works and should be known.
std::vector<std::string> ConfigWarnings(const Config& config);

// "127.0.0.1:7700", "[::1]:7700", "localhost:7700": both parts.
struct HostPort {
  std::string host;  // without brackets
  uint16_t port = 0;
};
absl::StatusOr<HostPort> ParseHostPort(absl::string_view address);
bool IsLoopback(const std::string& host);
// An IPv4 or IPv6 address, no name.
bool IsIpLiteral(const std::string& host);

inline constexpr absl::string_view kAllGpus = "cuda:all";
// The GPUs that config.device lists: 0 and 2 of "cuda:0,2". None: it is no such list.
std::optional<std::vector<uint32_t>> GpuNumbers(absl::string_view device);

}  // namespace ballast
