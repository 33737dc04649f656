// `ballastctl doctor`: what commonly goes wrong between a trainer and a daemon, each with its fix.
#include <google/protobuf/struct.pb.h>

#include <algorithm>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/protocol_version.h"
#include "proto/tls/certificate_files.h"
#include "proto/unix_address.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/http_probe.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

enum class Level { kOk, kWarn, kFail };
struct Finding {
  Level level = Level::kOk;
  std::string subject;
  std::string detail;
  std::string fix;
};

const char* LevelName(Level level) {
  constexpr const char* kNames[] = {"OK", "WARN", "FAIL"};
  return kNames[static_cast<int>(level)];
}

std::string HostOf(const std::string& address) { return address.substr(0, address.rfind(':')); }

// HostOf a Unix socket's address; a machine may be called unixbox.
bool IsSocket(const std::string& host) { return IsUnixAddress(absl::StrCat(host, ":")); }

bool IsLocal(const std::string& host) {
  return host == "localhost" || host == "[::1]" || host.starts_with("127.") || IsSocket(host);
}

Finding CheckState(const v1::GetServerResponse& server) {
  if (server.state() == "serving")
    return {Level::kOk, "state", absl::StrCat("serving, up ", Duration(server.uptime_s())), ""};
  return {Level::kFail, "state", absl::StrCat(server.state(), ": it takes no new runs or steps"),
          "wait until it is started again"};
}

Finding CheckProtocol(const v1::GetServerResponse& server) {
  const std::string range = absl::StrCat("the daemon speaks ", server.protocol_min(), " to ", server.protocol_max(),
                                         ", this client ", kProtocolMin, " to ", kProtocolMax);
  if (server.protocol_min() <= kProtocolMax && kProtocolMin <= server.protocol_max())
    return {Level::kOk, "protocol", range, ""};
  return {Level::kFail, "protocol", range, "install the same release on both sides"};
}

Finding CheckVersion(const v1::GetServerResponse& server) {
  if (server.version() == BALLAST_CLIENT_VERSION)
    return {Level::kOk, "version", server.version() + " on both sides", ""};
  return {Level::kWarn, "version",
          absl::StrCat("the daemon is ", server.version(), ", this client " BALLAST_CLIENT_VERSION),
          "install the same release on both sides"};
}

Finding CheckMemory(const v1::GetServerResponse& server) {
  const uint64_t limit = server.memory_limit_bytes(), reserved = std::min(server.memory_reserved_bytes(), limit);
  const std::string detail = absl::StrCat(Bytes(limit - reserved), " free of ", Bytes(limit));
  if (limit - reserved >= limit / 10) return {Level::kOk, "memory", detail, ""};
  return {Level::kWarn, "memory", detail, "delete runs that are over (`ballastctl runs`), or raise memory_limit"};
}

Finding CheckDevices(const v1::GetServerResponse& server) {
  for (const v1::DeviceStatus& device : server.devices()) {
    if (device.failure().empty()) continue;
    return {Level::kFail, "device", absl::StrCat(device.device(), " failed: ", device.failure()),
            "see nvidia-smi and the kernel's log; a restart of the daemon takes it again, and ends the other runs"};
  }
  return {Level::kOk, "device", server.device(), ""};
}

Finding CheckRuns(const v1::GetServerResponse& server, int runs) {
  const std::string detail = absl::StrCat(runs, " of at most ", server.max_runs());
  if (static_cast<uint32_t>(runs) < server.max_runs()) return {Level::kOk, "runs", detail, ""};
  return {Level::kWarn, "runs", detail,
          "delete runs that are over (`ballastctl runs` shows which are finished), raise max_runs, or set "
          "idle_run_timeout"};
}

Finding CheckFailedRuns(const v1::ListRunsResponse& runs) {
  std::vector<std::string> failed;
  for (const v1::RunStatus& run : runs.runs()) {
    if (run.state() == v1::RUN_STATE_FAILED) failed.push_back(run.run_id());
  }
  if (failed.empty()) return {Level::kOk, "failed runs", "none", ""};
  return {Level::kFail, "failed runs", absl::StrJoin(failed, ", "),
          "see the daemon's log, and start their trainers again: each run is made anew, with storage from its last "
          "checkpoint. To free their memory alone: `ballastctl delete RUN --keep-checkpoints`"};
}

// Runs whose last steps are on no disk, since they could not be written.
Finding CheckWriting(const v1::ListRunsResponse& runs) {
  std::vector<std::string> unwritten;
  for (const v1::RunStatus& run : runs.runs()) {
    const v1::DurabilityStatus& durability = run.durability();
    const std::string& why =
        durability.last_failure().empty() ? durability.journal_failure() : durability.last_failure();
    if (!why.empty()) unwritten.push_back(absl::StrCat(run.run_id(), ": ", why));
  }
  if (unwritten.empty()) return {Level::kOk, "checkpoints", "none has failed", ""};
  return {Level::kFail, "checkpoints", absl::StrJoin(unwritten, "; "),
          "make room on the disk, or see to it; then `ballastctl checkpoint RUN` tries again at once"};
}

// How the ops server is spoken to.
struct OpsDoor {
  double timeout_s;
  std::string authorities;  // PEM; empty: HTTP
  const char* scheme() const { return authorities.empty() ? "http://" : "https://"; }
};

// A daemon whose ops server speaks HTTPS speaks TLS itself, so that the file is there.
OpsDoor DoorOf(const v1::GetServerResponse& server, const Invocation& invocation) {
  OpsDoor door{.timeout_s = invocation.timeout_s, .authorities = ""};
  if (server.ops_tls()) door.authorities = ReadSmallFile(invocation.tls.ca).value_or("");
  return door;
}

// The ops server may listen on another address of the daemon's host; a wildcard or loopback one is asked by way of the
// host that answered.
// `asked`: where, if it could be.
Finding CheckOps(const v1::GetServerResponse& server, const std::string& host, const OpsDoor& door,
                 std::string* asked) {
  if (server.ops_address().empty()) {
    return {Level::kWarn, "metrics", "the ops endpoint is off",
            "set ops_http.listen, so that alerts can see the daemon"};
  }
  const std::string listens = HostOf(server.ops_address());
  const std::string port = server.ops_address().substr(server.ops_address().rfind(':'));
  if (IsLocal(listens) && !IsLocal(host)) {
    return {Level::kWarn, "metrics", absl::StrCat(server.ops_address(), " is open to the daemon's own host only"),
            "set ops_http.listen to an address that Prometheus reaches"};
  }
  const bool wildcard = listens == "0.0.0.0" || listens == "[::]" || listens.empty();
  const std::string address = wildcard ? (IsSocket(host) ? "localhost" : host) + port : server.ops_address();
  *asked = address;
  for (const char* path : {"/livez", "/readyz"}) {
    const auto answer = HttpGet(address, path, door.timeout_s, door.authorities);
    if (!answer.ok()) {
      return {Level::kFail, "metrics", std::string(answer.status().message()),
              "open that port, or correct ops_http.listen"};
    }
    const std::string said = absl::StrCat(door.scheme(), address, path, " says ", answer->status, ": ",
                                          absl::StripAsciiWhitespace(answer->body).substr(0, 200));
    if (answer->status == 403) {
      return {Level::kFail, "metrics", said,
              absl::StrCat("Prometheus gets the same by this name: set ops_http.hosts: [", HostOf(address), "]")};
    }
    if (answer->status != 200) {
      return {Level::kFail, "metrics", said, "the daemon is starting, draining or stuck: see its log"};
    }
  }
  return {Level::kOk, "metrics", absl::StrCat(door.scheme(), address, "/readyz is ready"), ""};
}

// The value of a metric without labels; 0: it is not there.
double MetricOf(const std::string& exposition, const std::string& name) {
  const std::string line = absl::StrCat("\n", name, " ");
  const size_t at = exposition.find(line);
  double value = 0;
  if (at == std::string::npos) return 0;
  const size_t begin = at + line.size();
  return absl::SimpleAtod(exposition.substr(begin, exposition.find('\n', begin) - begin), &value) ? value : 0;
}

// The exposition; empty: it is not to be had from here.
std::string MetricsOf(const std::string& ops_address, const OpsDoor& door) {
  if (ops_address.empty()) return "";
  auto answer = HttpGet(ops_address, "/metrics", door.timeout_s, door.authorities);
  return answer.ok() && answer->status == 200 ? std::move(answer->body) : "";
}

// What the disk has room for, as BallastStorageFillingUp has it.
Finding CheckRoom(const v1::GetServerResponse& server, const v1::ListRunsResponse& runs, const std::string& metrics) {
  if (server.has_relay()) return {Level::kOk, "disk", "none: a relay keeps nothing there", ""};
  if (metrics.empty()) return {Level::kOk, "disk", "not known without the metrics", ""};
  const double size = MetricOf(metrics, "ballast_storage_size_bytes");
  const double free = MetricOf(metrics, "ballast_storage_free_bytes");
  if (size == 0) {
    return {Level::kWarn, "disk", "none: runs are in the daemon's memory alone, and end with it",
            "set storage.dir, so that runs outlive the daemon; for a try-out this is fine"};
  }
  uint64_t checkpoints = 0;
  for (const v1::RunStatus& run : runs.runs()) checkpoints += run.durability().checkpoint_bytes();
  const std::string detail =
      absl::StrCat(Bytes(static_cast<uint64_t>(free)), " free of ", Bytes(static_cast<uint64_t>(size)));
  if (free > 0 && free >= 2 * static_cast<double>(checkpoints)) return {Level::kOk, "disk", detail, ""};
  return {Level::kWarn, "disk", absl::StrCat(detail, ", and one checkpoint of each run takes ", Bytes(checkpoints)),
          "make room on the file system of storage.dir: without it no checkpoint is written"};
}

// Checks the file descriptors that are left. A connection takes one, a trainer on the daemon's host two; when they run
// short, new connections are turned away.
Finding CheckFiles(const std::string& metrics) {
  constexpr double kFew = 1024;
  if (metrics.empty()) return {Level::kOk, "files", "not known without the metrics", ""};
  const double open = MetricOf(metrics, "process_open_fds"), most = MetricOf(metrics, "process_max_fds");
  const std::string detail = absl::StrCat(open, " of at most ", most, " open");
  if (most >= kFew && open < 0.8 * most) return {Level::kOk, "files", detail, ""};
  return {Level::kWarn, "files", detail,
          "connections will be refused: raise the daemon's hard limit of open files (ulimit -Hn, LimitNOFILE)"};
}

Finding CheckCores(const v1::GetServerResponse& server, const std::string& host) {
  const unsigned cores = std::thread::hardware_concurrency();
  if (!IsLocal(host)) return {Level::kOk, "processors", "the daemon is on another host", ""};
  if (!server.device().starts_with("cpu"))
    return {Level::kOk, "processors", absl::StrCat("the daemon updates on ", server.device()), ""};
  return {Level::kWarn, "processors",
          absl::StrCat("trainers here share ", cores, " processors with the daemon (", server.device(), ")"),
          "for speed give the daemon its own host or a GPU; for a try-out this is fine"};
}

// What was found of one daemon.
struct Examination {
  std::string server;
  std::vector<Finding> findings;
  bool reached() const { return findings.size() > 1; }
  bool failed() const {
    return std::any_of(findings.begin(), findings.end(), [](const Finding& f) { return f.level == Level::kFail; });
  }
};

// Of a daemon that answers, and not what it was asked.
std::vector<Finding> NotTold(const std::string& server, const absl::Status& why) {
  if (!absl::IsUnauthenticated(why) && !absl::IsPermissionDenied(why)) {
    return {
        {Level::kFail, "reachable", absl::StrCat(server, ": ", why.message()), "is it a ballastd? correct --server"}};
  }
  return {{Level::kOk, "reachable", server, ""},
          {Level::kFail, "access", std::string(why.message()),
           "give the file of a token that the daemon's access file has, by --token-file or BALLAST_TOKEN_FILE; "
           "`ballastctl token new` makes one"}};
}

std::vector<Finding> Examine(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) {
    return {{Level::kFail, "reachable", std::string(client.status().message()), ""}};
  }
  const auto server = (*client)->GetServer();
  const auto runs = (*client)->ListRuns();
  if (!server.ok() || !runs.ok()) return NotTold((*client)->server(), server.ok() ? runs.status() : server.status());
  const std::string host = HostOf((*client)->server());
  std::string ops_address;
  const OpsDoor door = DoorOf(*server, invocation);
  Finding ops = CheckOps(*server, host, door, &ops_address);
  const std::string metrics = MetricsOf(ops_address, door);
  return {{Level::kOk, "reachable", (*client)->server(), ""},
          CheckState(*server),
          CheckProtocol(*server),
          CheckVersion(*server),
          CheckDevices(*server),
          CheckMemory(*server),
          CheckRuns(*server, runs->runs_size()),
          CheckFailedRuns(*runs),
          CheckWriting(*runs),
          std::move(ops),
          CheckRoom(*server, *runs, metrics),
          CheckFiles(metrics),
          CheckCores(*server, host)};
}

int PrintAsJson(const Invocation& invocation, const std::vector<Examination>& examinations) {
  google::protobuf::Struct answer;
  auto* list = (*answer.mutable_fields())["findings"].mutable_list_value();
  for (const Examination& examination : examinations) {
    for (const Finding& finding : examination.findings) {
      auto& fields = *list->add_values()->mutable_struct_value()->mutable_fields();
      fields["server"].set_string_value(examination.server);
      fields["level"].set_string_value(LevelName(finding.level));
      fields["subject"].set_string_value(finding.subject);
      fields["detail"].set_string_value(finding.detail);
      fields["fix"].set_string_value(finding.fix);
    }
  }
  return PrintJson(invocation, answer);
}

void Print(const std::vector<Finding>& findings, std::ostream& out) {
  Table table({Table::kLeft, Table::kLeft, Table::kLeft});
  for (const Finding& finding : findings) {
    table.Row({LevelName(finding.level), finding.subject, finding.detail});
    if (!finding.fix.empty()) table.Row({"", "", absl::StrCat("fix: ", finding.fix)});
  }
  table.Print(out);
}

int Diagnose(const Invocation& invocation) {
  std::vector<Examination> examinations;
  if (auto options = OptionsOf(invocation); IsMisuse(options.status())) return Fail(invocation, options.status());
  for (const Invocation& of_one : OfEachDaemon(invocation)) examinations.push_back({of_one.server, Examine(of_one)});
  if (invocation.json) {
    if (const int printed = PrintAsJson(invocation, examinations); printed != kOk) return printed;
  } else {
    for (const Examination& examination : examinations) {
      if (examinations.size() > 1) invocation.out << "daemon " << examination.server << "\n";
      Print(examination.findings, invocation.out);
    }
  }
  const auto any = [&](auto is) { return std::any_of(examinations.begin(), examinations.end(), is); };
  if (any([](const Examination& e) { return !e.reached(); })) return kUnreachable;
  return any([](const Examination& e) { return e.failed(); }) ? kRefused : kOk;
}

}  // namespace

Command DoctorCommand() {
  return {
      .name = "doctor",
      .arguments = {},
      .summary = "examine the daemon from here, or each of several; each finding with its fix",
      .details = "Lines begin with OK, WARN or FAIL. Exit code 1 when one is FAIL, 69 when a daemon does not answer.\n",
      .flags = {},
      .run = Diagnose};
}

}  // namespace ballast::ctl
