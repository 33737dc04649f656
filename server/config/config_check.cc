#include "server/config/config_check.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "server/config/config_keys.h"

namespace ballast {
namespace {

// What others can do who reach the port, unless it asks for a token that they cannot read on the way.
std::string OpsWarning(const Config::OpsHttp& ops) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(ops.listen);
  if (!parsed.ok() || IsLoopback(parsed->host) || (ops.tls && !ops.token_file.empty())) return "";
  return absl::StrCat("ops_http.listen is not a loopback address: ",
                      ops.token_file.empty() ? "whoever reaches the port can read the metrics"
                                             : "without ops_http.tls whoever listens on the way reads the token",
                      " (", ops.listen, ")");
}

}  // namespace

ConfigError CheckConfig(const Config& config) {
  for (const ConfigRow& row : ConfigRows()) {
    if (std::string problem = row.problem(config); !problem.empty()) {
      return {.path = std::string(row.path), .problem = std::move(problem)};
    }
  }
  return {};
}

std::vector<std::string> ConfigWarnings(const Config& config) {
  std::vector<std::string> warnings;
  if (std::string ops = OpsWarning(config.ops_http); !ops.empty()) warnings.push_back(std::move(ops));
  if (std::find(config.ops_http.hosts.begin(), config.ops_http.hosts.end(), "*") != config.ops_http.hosts.end()) {
    warnings.push_back("ops_http.hosts allows any name: a web page in a browser that reaches the port can read it");
  }
  return warnings;
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  HostPort parsed;
  uint32_t port = 0;
  const absl::string_view digits = colon == absl::string_view::npos ? "" : address.substr(colon + 1);
  if (digits.empty() || digits.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(digits, &port) || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", address, "' has no port from 0 to 65535; write HOST:PORT, such as 127.0.0.1:7700"));
  }
  absl::string_view host = address.substr(0, colon);
  const bool bracketed = absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
  if (host.empty() || (host.find(':') != absl::string_view::npos) != bracketed) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", address, "' has no host; write HOST:PORT, such as 127.0.0.1:7700, [::1]:7700 or 0.0.0.0:7700 for all"));
  }
  return HostPort{.host = std::string(host), .port = static_cast<uint16_t>(port)};
}

bool IsLoopback(const std::string& host) { return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0; }

bool IsIpLiteral(const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> address;
  return inet_pton(AF_INET, host.c_str(), address.data()) == 1 ||
         inet_pton(AF_INET6, host.c_str(), address.data()) == 1;
}

std::optional<std::vector<uint32_t>> GpuNumbers(absl::string_view device) {
  if (!absl::ConsumePrefix(&device, "cuda:")) return std::nullopt;
  std::vector<uint32_t> numbers;
  for (const absl::string_view digits : absl::StrSplit(device, ',')) {
    uint32_t number = 0;
    const bool plain = !digits.empty() && digits.find_first_not_of("0123456789") == absl::string_view::npos;
    if (!plain || !absl::SimpleAtoi(digits, &number)) return std::nullopt;
    if (std::find(numbers.begin(), numbers.end(), number) != numbers.end()) return std::nullopt;
    numbers.push_back(number);
  }
  return numbers;
}

}  // namespace ballast
