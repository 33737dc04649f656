#include "server/config/config_check.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <functional>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ballast {
namespace {

constexpr uint64_t kTileBytes = 16384;  // 4096 fp32 elements; chunks are cut between tiles
// What a message holds besides one chunk's payload; generous: the largest header known is that of an int8 row-wise
// chunk.
constexpr uint64_t kHeaderRoomBytes = 65536;
constexpr uint64_t kStockClientMessageBytes = 4 << 20;  // gRPC's default receive limit
constexpr uint64_t kMostSpecBytes = 64 << 20;           // what our clients send and take

std::string CheckAddress(const std::string& address) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  return parsed.ok() ? "" : std::string(parsed.status().message());
}

std::string CheckOpsAddress(const std::string& address) { return address == "off" ? "" : CheckAddress(address); }

std::string CheckHosts(const std::vector<std::string>& hosts) {
  for (const std::string& host : hosts) {
    const bool plain = std::all_of(host.begin(), host.end(), [](unsigned char c) {
      return absl::ascii_isalnum(c) || c == '-' || c == '.' || c == '_';
    });
    if (host != "*" && !plain) return absl::StrCat("'", host, "' is no host name, which has no port; * is any");
  }
  return "";
}

std::string CheckSocket(const std::string& path) {
  constexpr size_t kMostBytes = 80;  // of the 107 of a socket's address; a folder gets a name as well
  if (path.empty() || path == "off" || (path.front() == '/' && path.size() <= kMostBytes)) return "";
  return absl::StrCat("'", path, "' is no absolute path of at most ", kMostBytes, " bytes; choose one, or off");
}

std::string CheckDevice(const std::string& device) {
  if (device == "cpu" || device == "auto" || device == kAllGpus || GpuNumbers(device)) return "";
  return absl::StrCat("'", device, "' is no device; choose cpu, auto, cuda:N, cuda:N,M or cuda:all");
}

std::string CheckOneOf(const std::string& got, std::initializer_list<absl::string_view> valid) {
  std::string list;
  for (const absl::string_view name : valid) {
    if (got == name) return "";
    absl::StrAppend(&list, list.empty() ? "" : ", ", name);
  }
  return absl::StrCat("'", got, "' is none of ", list);
}

struct Range {
  double min, max;
  absl::string_view unit = "";
};

std::string CheckRange(double got, Range range) {
  if (got >= range.min && got <= range.max) return "";
  return absl::StrFormat("%.16g%s is out of range; choose %.16g to %.16g", got, range.unit, range.min, range.max);
}

std::string CheckChunk(const Config::Limits& limits) {
  if (limits.chunk_bytes == 0 || limits.chunk_bytes % kTileBytes != 0) {
    return absl::StrCat(limits.chunk_bytes, " is not a multiple of 16KiB (4096 fp32 elements); choose 1MiB");
  }
  if (limits.chunk_bytes + kHeaderRoomBytes <= limits.message_bytes) return "";
  return absl::StrCat(limits.chunk_bytes, " does not fit a message of ", limits.message_bytes,
                      " bytes, of which 64KiB are for its header; lower it or raise limits.message_bytes");
}

std::string CheckCredit(const Config::Limits& limits) {
  if (limits.credit_bytes >= limits.chunk_bytes) return CheckRange(static_cast<double>(limits.credit_bytes), {1, 1e12});
  return absl::StrCat(limits.credit_bytes, " does not hold one chunk of ", limits.chunk_bytes,
                      " bytes; choose 64 chunks or so");
}

struct Check {
  absl::string_view path;
  std::function<std::string(const Config&)> problem;  // empty: none
};

template <typename Value>
std::function<std::string(const Config&)> Within(Value (*value)(const Config&), Range range) {
  return [=](const Config& c) { return CheckRange(static_cast<double>(value(c)), range); };
}

// In the order of the schema, but message_bytes before chunk_bytes, which is checked against it. A key without a row
// takes any value of its type.
const std::vector<Check>& Checks() {
  static const auto& checks = *new std::vector<Check>{
      {"listen", [](const Config& c) { return CheckAddress(c.listen); }},
      {"device", [](const Config& c) { return CheckDevice(c.device); }},
      {"threads", Within(+[](const Config& c) { return c.threads; }, {0, 4096})},
      {"max_runs", Within(+[](const Config& c) { return c.max_runs; }, {1, 1024})},
      {"ops_http.listen", [](const Config& c) { return CheckOpsAddress(c.ops_http.listen); }},
      {"ops_http.hosts", [](const Config& c) { return CheckHosts(c.ops_http.hosts); }},
      {"log.level",
       [](const Config& c) {
         return CheckOneOf(c.log.level, {"debug", "info", "warn", "error"});
       }},
      {"log.format",
       [](const Config& c) {
         return CheckOneOf(c.log.format, {"json", "text"});
       }},
      {"limits.tensors", Within(+[](const Config& c) { return c.limits.tensors; }, {1, 1e7})},
      {"limits.name_bytes", Within(+[](const Config& c) { return c.limits.name_bytes; }, {1, 65536})},
      {"limits.message_bytes", Within(+[](const Config& c) { return c.limits.message_bytes; },
                                      {kTileBytes + kHeaderRoomBytes, kStockClientMessageBytes})},
      {"limits.chunk_bytes", [](const Config& c) { return CheckChunk(c.limits); }},
      {"limits.credit_bytes", [](const Config& c) { return CheckCredit(c.limits); }},
      {"limits.lease", Within(+[](const Config& c) { return c.limits.lease_s; }, {0.1, 3600, "s"})},
      {"limits.open_timeout", Within(+[](const Config& c) { return c.limits.open_timeout_s; }, {0.1, 3600, "s"})},
      {"limits.layer_groups", Within(+[](const Config& c) { return c.limits.layer_groups; }, {1, 256})},
      {"limits.pull_timeout", Within(+[](const Config& c) { return c.limits.pull_timeout_s; }, {0.1, 3600, "s"})},
      {"limits.spec_bytes", Within(+[](const Config& c) { return c.limits.spec_bytes; }, {1024, kMostSpecBytes})},
      {"limits.connections", Within(+[](const Config& c) { return c.limits.connections; }, {0, 1e6})},
      {"shm_socket", [](const Config& c) { return CheckSocket(c.shm_socket); }},
      {"watchdog",
       [](const Config& c) {
         return c.watchdog_s == 0 ? "" : CheckRange(c.watchdog_s, {30, 86400, "s"});
       }},
      {"drain_timeout", Within(+[](const Config& c) { return c.drain_timeout_s; }, {0, 3600, "s"})},
  };
  return checks;
}

void WarnUnlessLoopback(const std::string& address, absl::string_view text, std::vector<std::string>* warnings) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (parsed.ok() && !IsLoopback(parsed->host)) warnings->push_back(absl::StrCat(text, " (", address, ")"));
}

}  // namespace

ConfigError CheckConfig(const Config& config) {
  for (const Check& check : Checks()) {
    if (std::string problem = check.problem(config); !problem.empty()) {
      return {.path = std::string(check.path), .problem = std::move(problem)};
    }
  }
  return {};
}

std::vector<std::string> ConfigWarnings(const Config& config) {
  std::vector<std::string> warnings;
  WarnUnlessLoopback(config.listen,
                     "listen is not a loopback address: there is neither TLS nor authentication, so whoever reaches "
                     "the port can read and change every run",
                     &warnings);
  WarnUnlessLoopback(config.ops_http.listen,
                     "ops_http.listen is not a loopback address: whoever reaches the port can read the metrics",
                     &warnings);
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
