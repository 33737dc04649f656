// The daemon's configuration: one YAML file whose schema is ballast.v1.DaemonConfig, overridden by BALLAST_*
// environment variables, overridden by flags. An unknown key, a wrong type or an impossible value is an error that
// names the file, the line and the fix.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast {

struct Config {
  std::string listen = "127.0.0.1:7700";  // or unix:/PATH
  std::string device = "auto";
  uint32_t threads = 0;       // 0 = all processors
  uint64_t memory_limit = 0;  // on each device; 0 = 80 % of its memory
  uint32_t max_runs = 16;
  bool reflection = false;
  double drain_timeout_s = 10;
  double watchdog_s = 0;  // 0: none
  bool end_with_stdin = false;
  double idle_run_timeout_s = 0;  // 0: none
  // Resolved: a path, a folder with / at its end, or off, as when it is empty. Default: $XDG_RUNTIME_DIR/ballast/, or
  // without that variable /run/ballast/ for root, else /tmp/ballast-UID/.
  std::string shm_socket;
  struct OpsHttp {
    std::string listen = "127.0.0.1:9464";  // "off": none
    std::vector<std::string> hosts;         // "*": any
    bool tls = false;
    std::string token_file;  // empty: none
  } ops_http;
  struct Storage {
    std::string dir = "off";
    uint32_t threads = 4;
    uint64_t bytes_per_s = 0;               // 0: no limit
    std::vector<std::string> on_published;  // program and arguments; empty: none
    double on_published_timeout_s = 600;
    std::string import_dir = "off";
    bool on() const { return dir != "off"; }
  } storage;
  struct Log {
    std::string level = "info";
    std::string format;  // resolved: text | json
  } log;
  struct Limits {
    uint32_t tensors = 100000;
    uint32_t name_bytes = 512;
    uint32_t message_bytes = 2 << 20;
    uint32_t spec_bytes = 16 << 20;
    uint64_t chunk_bytes = 1 << 20;
    uint64_t credit_bytes = 64 << 20;
    double lease_s = 10;
    double open_timeout_s = 30;
    uint32_t layer_groups = 64;
    uint32_t connections = 0;  // 0 = half the file descriptors, at most 4096
    double pull_timeout_s = 60;
    double idle_timeout_s = 1800;  // 0: any time
    double handshake_timeout_s = 10;
    // Of one caller; 0: any number.
    uint32_t caller_runs = 0;
    uint64_t caller_bytes = 0;
    uint32_t caller_streams = 0;
    uint32_t caller_requests = 0;    // a second
    uint32_t caller_failures = 100;  // a minute
  } limits;
  struct Relay {
    std::string upstream;  // empty: none
    std::vector<std::string> runs;
    uint32_t readers = 64;
    std::string ca, certificate, key, token_file;  // files; empty: none
    bool on() const { return !upstream.empty(); }
  } relay;
  bool insecure = false;
  bool nccl = false;
  std::string access;  // file; empty: none
  struct Tls {
    std::string certificate, key, client_ca;      // files; empty: none
    std::string client_certificates = "require";  // or none
    bool on() const { return !certificate.empty(); }
    bool requires_clients() const { return client_certificates == "require"; }
  } tls;
};

// What the command line asks for.
struct CommandLine {
  Config config;
  enum class Action { kServe, kCheckConfig, kPrintConfig, kHelp, kVersion, kDescribeMetrics } action = Action::kServe;
  std::string config_file;                   // as read; empty: none
  std::vector<std::string> warnings;         // one line each: a variable nobody reads, a port that others can reach
  std::map<std::string, std::string> where;  // the keys that were given: where, such as ballast.yaml:3
};

// A key's value is at fault: `problem` with the place where it was given. INVALID_ARGUMENT: by a flag.
absl::Status ConfigFault(const CommandLine& line, const std::string& path, const std::string& problem);

// `environment`: all variables by name; handed in so that tests own it. INVALID_ARGUMENT: a flag is at fault; anything
// else: the file or the environment is. After --help, --version or --describe-metrics nothing else is read.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const std::map<std::string, std::string>& environment);

// Generated from the schema.
std::string HelpText();
// The effective configuration as YAML that the daemon accepts.
std::string PrintConfig(const Config& config);

}  // namespace ballast
