#include "server/config/config_keys.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "proto/batch.h"

#include "server/config/config_check.h"
#include "server/config/relay_check.h"

namespace ballast {
namespace {

constexpr uint64_t kTileBytes = 16384;  // 4096 fp32 elements; chunks are cut between tiles
// What a message holds besides one chunk's payload; generous: the largest header known is that of an int8 row-wise
// chunk.
constexpr uint64_t kHeaderRoomBytes = 65536;
constexpr uint64_t kStockClientMessageBytes = 4 << 20;  // gRPC's default receive limit
constexpr uint64_t kMostSpecBytes = 64 << 20;           // what the clients send and take

// Empty: it may be reached as it is.
std::string CheckReach(const Config& config) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(config.listen);
  if (!parsed.ok()) return std::string(parsed.status().message());
  if (IsLoopback(parsed->host) || config.tls.on() || config.insecure) return "";
  return absl::StrCat("'", config.listen,
                      "' is reached from other machines, and without TLS whoever reaches it can read and change every "
                      "run; configure tls (`ballastctl certs init` makes certificates to begin with), listen at "
                      "127.0.0.1, or write insecure: true");
}

// A port, or a Unix socket's absolute path.
std::string CheckListen(const Config& config) {
  constexpr size_t kMostBytes = 107;  // of a socket's address
  absl::string_view path = config.listen;
  if (!absl::ConsumePrefix(&path, "unix:")) return CheckReach(config);
  if (absl::StartsWith(path, "/") && path.size() <= kMostBytes) return "";
  return absl::StrCat("'", path, "' is no absolute path of at most ", kMostBytes,
                      " bytes; write unix:/PATH, such as unix:/run/ballast/grpc");
}

std::string CheckOpsAddress(const std::string& address) {
  if (address == "off") return "";
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (!parsed.ok()) return std::string(parsed.status().message());
  if (!absl::StrContains(parsed->host, ':')) return "";
  return absl::StrCat("'", address,
                      "' is an address of IPv6, at which the HTTP port cannot be; write 127.0.0.1:", parsed->port,
                      ", or 0.0.0.0:", parsed->port, " for all");
}

std::string CheckHosts(const std::vector<std::string>& hosts) {
  for (const std::string& host : hosts) {
    const bool plain = !host.empty() && std::all_of(host.begin(), host.end(), [](unsigned char c) {
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

// What a key's value may be. Each is called with the value and says what is wrong with it; empty: nothing.
struct AnyValue {
  template <class Value>
  std::string operator()(const Value&) const {
    return "";
  }
};

struct OneOf {
  std::vector<absl::string_view> valid;

  std::string operator()(const std::string& got) const {
    if (std::find(valid.begin(), valid.end(), got) != valid.end()) return "";
    return absl::StrCat("'", got, "' is none of ", absl::StrJoin(valid, ", "));
  }
};

struct Range {
  double min, max;
  absl::string_view unit = "";

  template <class Number>
  requires std::is_arithmetic_v<Number> std::string operator()(Number number) const {
    const auto got = static_cast<double>(number);
    if (got >= min && got <= max) return "";
    return absl::StrFormat("%.16g%s is out of range; choose %.16g to %.16g", got, unit, min, max);
  }
};

// The clients put small messages together whatever the chunks are (proto/batch.h).
std::string CheckMessage(uint32_t bytes) {
  constexpr uint64_t kLeast = kMostBatchBytes + kHeaderRoomBytes;
  if (bytes >= kLeast && bytes <= kStockClientMessageBytes) return "";
  return absl::StrCat(bytes, " is out of range; choose ", kLeast,
                      ", which a batch of the clients' small messages needs, to ", kStockClientMessageBytes);
}

std::string CheckChunk(const Config& config) {
  const Config::Limits& limits = config.limits;
  if (limits.chunk_bytes == 0 || limits.chunk_bytes % kTileBytes != 0) {
    return absl::StrCat(limits.chunk_bytes, " is not a multiple of 16KiB (4096 fp32 elements); choose 1MiB");
  }
  if (limits.chunk_bytes + kHeaderRoomBytes <= limits.message_bytes) return "";
  return absl::StrCat(limits.chunk_bytes, " does not fit a message of ", limits.message_bytes,
                      " bytes, of which 64KiB are for its header; lower it or raise limits.message_bytes");
}

std::string CheckCredit(const Config& config) {
  const Config::Limits& limits = config.limits;
  if (limits.credit_bytes >= limits.chunk_bytes) return Range{1, 1e12}(limits.credit_bytes);
  return absl::StrCat(limits.credit_bytes, " does not hold one chunk of ", limits.chunk_bytes,
                      " bytes; choose 64 chunks or so");
}

std::string CheckFolder(const std::string& dir) {
  if (dir == "off" || absl::StartsWith(dir, "/")) return "";
  return "is neither off nor the absolute path of a folder";
}

// "{fodler}", where an argument has one that nothing will stand for; empty: none. Braces with anything else in them,
// such as a pattern's, are the program's own.
std::string UnknownPlaceholder(absl::string_view argument) {
  constexpr absl::string_view kKnown[] = {"folder", "run", "step", "number"};
  for (size_t open = argument.find('{'); open != absl::string_view::npos; open = argument.find('{', open + 1)) {
    const size_t close = argument.find('}', open);
    if (close == absl::string_view::npos) break;
    const absl::string_view word = argument.substr(open + 1, close - open - 1);
    const bool is_word = !word.empty() && std::all_of(word.begin(), word.end(), absl::ascii_islower);
    if (is_word && std::find(std::begin(kKnown), std::end(kKnown), word) == std::end(kKnown)) {
      return std::string(argument.substr(open, close - open + 1));
    }
  }
  return "";
}

std::string CheckOnPublished(const Config& config) {
  const std::vector<std::string>& command = config.storage.on_published;
  if (command.empty()) return "";
  if (!config.storage.on()) return "wants storage.dir: without it no checkpoint is written";
  if (!absl::StartsWith(command[0], "/")) {
    return absl::StrCat("'", command[0], "' is no absolute path of a program; write /usr/bin/rclone, say");
  }
  for (const std::string& argument : command) {
    if (const std::string unknown = UnknownPlaceholder(argument); !unknown.empty()) {
      return absl::StrCat("nothing stands for ", unknown, "; there are {folder}, {run}, {step} and {number}");
    }
  }
  return "";
}

// Below or above storage.dir, a checkpoint would be brought from where the daemon itself writes.
std::string CheckImportFolder(const Config& config) {
  const std::string &dir = config.storage.import_dir, &storage = config.storage.dir;
  if (dir == "off") return "";
  if (!config.storage.on()) return "wants storage.dir: without it there is nothing to bring a checkpoint to";
  if (std::string wrong = CheckFolder(dir); !wrong.empty()) return wrong;
  const std::string inner = absl::StrCat(absl::StripSuffix(dir, "/"), "/");
  const std::string outer = absl::StrCat(absl::StripSuffix(storage, "/"), "/");
  if (!absl::StartsWith(inner, outer) && !absl::StartsWith(outer, inner)) return "";
  return absl::StrCat("is in, or around, storage.dir (", storage, "); choose a folder beside it");
}

std::string CheckFile(const std::string& file) {
  return file.empty() || absl::StartsWith(file, "/") ? "" : absl::StrCat("'", file, "' is no absolute path of a file");
}

std::string CheckCertificate(const Config& config) {
  const Config::Tls& tls = config.tls;
  if (!tls.on()) return "";
  if (std::string wrong = CheckFile(tls.certificate); !wrong.empty()) return wrong;
  if (tls.key.empty()) return "wants tls.key: the file of its key";
  if (absl::StartsWith(config.listen, "unix:")) {
    return absl::StrCat("listen is ", config.listen,
                        ", a Unix socket, which TLS is not for: the rights of its file say who may connect. Leave tls "
                        "out, or listen at HOST:PORT");
  }
  if (!tls.requires_clients() || !tls.client_ca.empty()) return "";
  return "wants tls.client_ca: the authorities whose certificates let a client in; or, to let everybody in, "
         "tls.client_certificates: none";
}

// key, client_ca: which go with a certificate.
template <std::string Config::Tls::*File>
std::string CheckBesideCertificate(const Config& config) {
  const std::string& file = config.tls.*File;
  if (file.empty() || config.tls.on()) return CheckFile(file);
  return "wants tls.certificate: without it there is no TLS";
}

std::string CheckClientAuthorities(const Config& config) {
  if (std::string wrong = CheckBesideCertificate<&Config::Tls::client_ca>(config); !wrong.empty()) return wrong;
  if (config.tls.client_ca.empty() || config.tls.requires_clients()) return "";
  return "is not looked at with tls.client_certificates: none; leave one of the two out";
}

// Tokens are not sent where others can read them on their way.
std::string CheckAccessFile(const Config& config) {
  if (config.access.empty()) return "";
  if (std::string wrong = CheckFile(config.access); !wrong.empty()) return wrong;
  if (config.tls.on() || absl::StartsWith(config.listen, "unix:")) return "";
  return "wants tls.certificate, or listen: unix:/PATH: tokens are sent over TLS or a Unix socket alone";
}

std::string CheckOpsTls(const Config& config) {
  return !config.ops_http.tls || config.tls.on() ? "" : "wants tls.certificate and tls.key, which it takes";
}

std::string CheckWatchdog(double watchdog_s) { return watchdog_s == 0 ? "" : Range{30, 86400, "s"}(watchdog_s); }
std::string CheckIdleTimeout(double idle_s) { return idle_s == 0 ? "" : Range{1, 86400, "s"}(idle_s); }

// The member at the end of a path of members: its section, then itself.
template <auto First, auto... Rest, class AConfig>
auto& MemberOf(AConfig& config) {
  return ((config.*First).*....*Rest);
}

// check: of the key's value, or of the configuration where other keys matter, too.
template <auto... Path, class Check>
ConfigRow Row(absl::string_view path, Check check) {
  const auto problem = [check = std::move(check)](const Config& config) -> std::string {
    if constexpr (std::is_invocable_v<Check, const Config&>) {
      return check(config);
    } else {
      return check(MemberOf<Path...>(config));
    }
  };
  return {path, [](Config& config) -> ConfigMember { return &MemberOf<Path...>(config); }, problem};
}

}  // namespace

const std::vector<ConfigRow>& ConfigRows() {
  using Ops = Config::OpsHttp;
  using Limits = Config::Limits;
  constexpr auto kOps = &Config::ops_http;
  constexpr auto kStorage = &Config::storage;
  constexpr auto kLog = &Config::log;
  constexpr auto kLimits = &Config::limits;
  using Relay = Config::Relay;
  constexpr auto kTls = &Config::tls;
  constexpr auto kRelay = &Config::relay;
  static const auto& rows = *new std::vector<ConfigRow>{
      Row<&Config::listen>("listen", CheckListen),
      Row<&Config::device>("device", CheckDevice),
      Row<&Config::threads>("threads", Range{0, 4096}),
      Row<&Config::memory_limit>("memory_limit", AnyValue{}),
      Row<&Config::max_runs>("max_runs", Range{1, 1024}),
      Row<&Config::reflection>("reflection", AnyValue{}),
      Row<kOps, &Ops::listen>("ops_http.listen", CheckOpsAddress),
      Row<kOps, &Ops::hosts>("ops_http.hosts", CheckHosts),
      Row<kOps, &Ops::tls>("ops_http.tls", CheckOpsTls),
      Row<kOps, &Ops::token_file>("ops_http.token_file", CheckFile),
      Row<kStorage, &Config::Storage::dir>("storage.dir", CheckFolder),
      Row<kStorage, &Config::Storage::threads>("storage.threads", Range{1, 64}),
      Row<kStorage, &Config::Storage::bytes_per_s>("storage.bytes_per_second", AnyValue{}),
      Row<kStorage, &Config::Storage::on_published>("storage.on_published", CheckOnPublished),
      Row<kStorage, &Config::Storage::on_published_timeout_s>("storage.on_published_timeout", Range{1, 86400, "s"}),
      Row<kStorage, &Config::Storage::import_dir>("storage.import_dir", CheckImportFolder),
      Row<kLog, &Config::Log::level>("log.level", OneOf{{"debug", "info", "warn", "error"}}),
      Row<kLog, &Config::Log::format>("log.format", OneOf{{"json", "text"}}),
      Row<kLimits, &Limits::tensors>("limits.tensors", Range{1, 1e7}),
      Row<kLimits, &Limits::name_bytes>("limits.name_bytes", Range{1, 65536}),
      Row<kLimits, &Limits::message_bytes>("limits.message_bytes", CheckMessage),
      Row<kLimits, &Limits::chunk_bytes>("limits.chunk_bytes", CheckChunk),
      Row<kLimits, &Limits::credit_bytes>("limits.credit_bytes", CheckCredit),
      Row<kLimits, &Limits::lease_s>("limits.lease", Range{0.1, 3600, "s"}),
      Row<kLimits, &Limits::open_timeout_s>("limits.open_timeout", Range{0.1, 3600, "s"}),
      Row<kLimits, &Limits::layer_groups>("limits.layer_groups", Range{1, 256}),
      Row<kLimits, &Limits::pull_timeout_s>("limits.pull_timeout", Range{0.1, 3600, "s"}),
      Row<kLimits, &Limits::idle_timeout_s>("limits.idle_timeout", CheckIdleTimeout),
      Row<kLimits, &Limits::handshake_timeout_s>("limits.handshake_timeout", Range{0.1, 300, "s"}),
      Row<kLimits, &Limits::caller_runs>("limits.caller_runs", Range{0, 1e6}),
      Row<kLimits, &Limits::caller_bytes>("limits.caller_bytes", AnyValue{}),
      Row<kLimits, &Limits::caller_streams>("limits.caller_streams", Range{0, 1e6}),
      Row<kLimits, &Limits::caller_requests>("limits.caller_requests", Range{0, 1e6}),
      Row<kLimits, &Limits::caller_failures>("limits.caller_failures", Range{0, 1e6}),
      Row<kLimits, &Limits::spec_bytes>("limits.spec_bytes", Range{1024, kMostSpecBytes}),
      Row<kLimits, &Limits::connections>("limits.connections", Range{0, 1e6}),
      Row<&Config::shm_socket>("shm_socket", CheckSocket),
      Row<&Config::watchdog_s>("watchdog", CheckWatchdog),
      Row<&Config::end_with_stdin>("end_with_stdin", AnyValue{}),
      Row<&Config::idle_run_timeout_s>("idle_run_timeout", Range{0, 1e9, "s"}),
      Row<&Config::drain_timeout_s>("drain_timeout", Range{0, 3600, "s"}),
      Row<&Config::insecure>("insecure", AnyValue{}),
      Row<&Config::nccl>("nccl", AnyValue{}),
      Row<kTls, &Config::Tls::client_certificates>("tls.client_certificates", OneOf{{"require", "none"}}),
      Row<kTls, &Config::Tls::certificate>("tls.certificate", CheckCertificate),
      Row<kTls, &Config::Tls::key>("tls.key", CheckBesideCertificate<&Config::Tls::key>),
      Row<kTls, &Config::Tls::client_ca>("tls.client_ca", CheckClientAuthorities),
      Row<&Config::access>("access", CheckAccessFile),
      Row<kRelay, &Relay::upstream>("relay.upstream", CheckUpstream),
      Row<kRelay, &Relay::runs>("relay.runs", CheckRelayedRuns),
      Row<kRelay, &Relay::readers>("relay.readers", Range{1, 1024}),
      Row<kRelay, &Relay::ca>("relay.ca", CheckRelayCa),
      Row<kRelay, &Relay::certificate>("relay.certificate", CheckRelayCertificate),
      Row<kRelay, &Relay::key>("relay.key", CheckRelayKey),
      Row<kRelay, &Relay::token_file>("relay.token_file", CheckRelayToken),
  };
  return rows;
}

const ConfigRow* FindConfigRow(absl::string_view path) {
  const std::vector<ConfigRow>& rows = ConfigRows();
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const ConfigRow& row) { return row.path == path; });
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace ballast
