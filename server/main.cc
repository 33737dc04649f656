// ballastd: the process around Server. Exit codes: 0 drained, 1 could not start, 64 bad flag, 70 no GPU is left, 71 the
// watchdog, 74 drained, but the last steps of some run could not be written, 75 stopped by a second signal before it was
// drained, 78 bad configuration.
#include <grpc/support/log.h>
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "proto/tls/token_file.h"

#include "server/access/access_list.h"
#include "server/base/descriptors.h"
#include "server/base/failpoint.h"
#include "server/base/host.h"
#include "server/base/lifeline.h"
#include "server/base/log.h"
#include "server/base/sd_notify.h"
#include "server/base/status_macros.h"
#include "server/base/stop_signals.h"
#include "server/base/version.h"
#include "server/config/config.h"
#include "server/metrics/metrics.h"
#include "server/named_files.h"
#include "server/ops/ops_http.h"
#include "server/ops/watchdog.h"
#include "server/server.h"
#include "server/tls/certificate_keeper.h"

extern char** environ;

namespace ballast {
namespace {

enum ExitCode {
  kDrained = 0,
  kCannotStart = 1,
  kBadFlag = 64,
  kDevicesFailed = 70,
  kSilent = 71,
  kNotWritten = 74,
  kSecondSignal = 75,
  kBadConfig = 78
};

// glibc gives freed receive buffers back to the kernel at once and faults them in again for the next chunk: 1.6 to 1.85
// times slower receiving. 32 MiB is the most that glibc takes for the mmap threshold.
void TuneAllocator() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
}

std::map<std::string, std::string> Environment() {
  std::map<std::string, std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (const size_t equals = text.find('='); equals != std::string::npos) {
      variables[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  return variables;
}

LogLevel LevelOf(const std::string& name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warn") return LogLevel::kWarn;
  return name == "error" ? LogLevel::kError : LogLevel::kInfo;
}

void LogOfGrpc(gpr_log_func_args* args) {
  const LogLevel level = args->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kError
                         : args->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                   : LogLevel::kDebug;
  Log(level, "grpc", "message of gRPC",
      {{"err", args->message}, {"source", absl::StrCat(args->file, ":", args->line)}});
}

std::string Gibibytes(uint64_t bytes) { return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1ULL << 30)); }

std::string Banner(const Server& server, const std::string& ops_address, const Config& config) {
  std::string memory = Gibibytes(server.memory_limit_bytes());
  if (absl::StartsWith(server.device(), "cpu")) absl::StrAppend(&memory, " of ", Gibibytes(MachineMemoryBytes()));
  return absl::StrCat("ballastd ", Version(), " (rev ", Revision(), ") | ", server.device(), " | memory ", memory,
                      " | grpc ", server.address(), config.tls.on() ? " (tls)" : "", " | metrics ",
                      ops_address.empty()
                          ? "off"
                          : absl::StrCat(config.ops_http.tls ? "https://" : "http://", ops_address, "/metrics"));
}

// systemd's WatchdogSec, where it asks for one: it wants to hear twice in that time.
double TellEverySeconds(const char* watchdog_usec) {
  int64_t microseconds = 0;
  if (watchdog_usec == nullptr || !absl::SimpleAtoi(watchdog_usec, &microseconds) || microseconds <= 0) return 0;
  return static_cast<double>(microseconds) / 2e6;
}

int CannotStart(const absl::Status& why) {
  absl::FPrintF(stderr, "ballastd: %s\n", why.message());
  return kCannotStart;
}

// The daemon from start to exit. The ops port is up first and gone last, so that a start and a drain can be watched.
class Daemon {
 public:
  // signals: outlive it.
  Daemon(const CommandLine& line, const StopSignals* signals)
      : signals_(signals), config_(line.config), warnings_(line.warnings) {}

  // tell_every_s: as in TellEverySeconds.
  int Run(const std::string& notify_socket, double tell_every_s) {
    for (const std::string& warning : warnings_) Log(LogLevel::kWarn, "config", "check this", {{"err", warning}});
    metrics_.SetState("starting");
    const std::unique_ptr<Lifeline> lifeline = WatchInput();
    if (const absl::Status opened = OpenCertificates(); !opened.ok()) return CannotStart(opened);
    auto ops = StartOps();
    if (!ops.ok()) return CannotStart(ops.status());
    auto server = Server::Start(
        config_, &metrics_, (*ops)->address(),
        [this](const absl::Status&) {
          devices_failed_ = true;
          if (!draining_) kill(getpid(), SIGTERM);
        },
        certificates_.get());
    if (!server.ok()) return CannotStart(server.status());
    server_ = server->get();
    absl::PrintF("%s\n", Banner(**server, (*ops)->address(), config_));
    std::fflush(stdout);
    SdNotify(notify_socket, "READY=1");
    const Watchdog watchdog(WatchOptions(notify_socket, tell_every_s));
    const int signal = signals_->Await([] {
      Log(LogLevel::kInfo, "sighup",
          "SIGHUP: configuration is read at the start; certificates and the access file are read when they change");
    });
    SdNotify(notify_socket, "STOPPING=1");
    Drain(server->get(), signal);
    // All that is to be kept is on the disk. A driver that failed may never give back what it holds, and gRPC's own end
    // waits, for ten seconds now and then, for a thread that polls connections which are gone.
    std::fflush(nullptr);
    _exit(devices_failed_ ? kDevicesFailed : (*server)->wrote_all() ? kDrained : kNotWritten);
  }

 private:
  absl::Status OpenCertificates() {
    if (!config_.tls.on()) return absl::OkStatus();
    ASSIGN_OR_RETURN(certificates_, CertificateKeeper::Open(config_.tls, &metrics_));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<OpsHttp>> StartOps() {
    OpsSecurity security{.certificates = config_.ops_http.tls ? certificates_.get() : nullptr, .token = ""};
    if (const std::string& file = config_.ops_http.token_file; !file.empty()) {
      ASSIGN_OR_RETURN(security.token, ReadToken(file));
    }
    return OpsHttp::Start(config_.ops_http.listen, Content(), config_.ops_http.hosts, std::move(security));
  }

  OpsContent Content() {
    const auto metrics = [this] {
      metrics_.SetLive(Live().ok());
      return metrics_.Serialize();
    };
    return {.metrics = metrics,
            .live = [this] { return Live(); },
            .ready = [this] { return Ready(); },
            .api = [this](const std::string& path, const std::string& query) { return Api(path, query); }};
  }

  // Nobody is left for whom a step could be finished, or the daemon kept.
  std::unique_ptr<Lifeline> WatchInput() {
    if (!config_.end_with_stdin) return nullptr;
    return std::make_unique<Lifeline>(STDIN_FILENO, [this] {
      input_ended_ = true;
      if (!draining_) kill(getpid(), SIGTERM);
    });
  }

  Watchdog::Options WatchOptions(const std::string& notify_socket, double tell_every_s) {
    Watchdog::Options options{.live = [this] { return Live(); },
                              .most_silent_s = config_.watchdog_s,
                              .on_silent = [this](const absl::Status& why) { EndSilent(why); }};
    if (tell_every_s > 0) {
      options.look_every_s = std::min(options.look_every_s, tell_every_s);
      options.tell = [notify_socket] { SdNotify(notify_socket, "WATCHDOG=1"); };
    }
    return options;
  }

  // Whatever does not answer may hold locks, so nothing is drained and nothing is waited for.
  void EndSilent(const absl::Status& why) const {
    if (draining_) return;  // which has a deadline of its own
    Log(LogLevel::kError, "watchdog", "the daemon does not answer itself; it ends, to be started anew",
        {{"err", std::string(why.message())}, {"dur_s", config_.watchdog_s}});
    _exit(kSilent);
  }

  absl::Status Live() const {
    const Server* server = server_;
    return server == nullptr ? absl::OkStatus() : server->live();
  }

  absl::Status Ready() const {
    const Server* server = server_;
    if (server == nullptr) return absl::UnavailableError("starting");
    return server->ready() ? absl::OkStatus() : absl::UnavailableError("draining");
  }

  OpsResponse Api(const std::string& path, const std::string& query) const {
    Server* server = server_;
    if (server == nullptr) return {.status = 503, .body = "starting\n"};
    return server->AnswerApi(path, query);
  }

  void Drain(Server* server, int signal) {
    draining_ = true;
    StopSignals::OnNext([](int) { _exit(kSecondSignal); });
    const std::string cause = devices_failed_     ? "no device is left"
                              : input_ended_      ? "the end of standard input"
                              : signal == SIGTERM ? "SIGTERM"
                              : signal == SIGINT  ? "SIGINT"
                                                  : "SIGHUP: its terminal is gone";
    const double timeout_s = input_ended_ ? 0 : config_.drain_timeout_s;
    Log(LogLevel::kInfo, "drain", "draining; a second signal stops at once",
        {{"cause", cause}, {"timeout_s", timeout_s}});
    const int left_open = server->Drain(timeout_s);
    Log(left_open == 0 ? LogLevel::kInfo : LogLevel::kWarn, "drained", "drained",
        {{"steps_left_open", static_cast<int64_t>(left_open)}});
  }

  const StopSignals* const signals_;
  const Config config_;
  const std::vector<std::string> warnings_;
  Metrics metrics_{ThisBuild()};
  std::unique_ptr<CertificateKeeper> certificates_;  // with TLS
  std::atomic<Server*> server_ = nullptr;
  std::atomic<bool> devices_failed_ = false, draining_ = false, input_ended_ = false;
};

// Under a limit of file sizes (LimitFSIZE, ulimit -f) a write then fails like one to a full disk: a checkpoint fails, and
// the daemon goes on. So does one to a pipe that nobody will read: the log's, say.
// Whoever started the daemon may ignore the end of children, which would then be nobody's to ask for.
void SetSignals() {
  struct sigaction action {};
  action.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &action, nullptr);
  sigaction(SIGPIPE, &action, nullptr);
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, nullptr);
}

int Serve(const CommandLine& line) {
  const StopSignals signals;
  SetSignals();
  ConfigureLog(LevelOf(line.config.log.level), line.config.log.format);
  gpr_set_log_function(LogOfGrpc);
  if (const char* const place = std::getenv("TEST_FAILPOINT")) ArmFailpoint(place);
  const uint64_t before = RaiseDescriptorLimit();
  if (const uint64_t now = MostDescriptors(); now != before) {
    Log(LogLevel::kInfo, "descriptors", "the limit of open files was raised", {{"from", before}, {"to", now}});
  }
  const char* notify_socket = std::getenv("NOTIFY_SOCKET");
  return Daemon(line, &signals)
      .Run(notify_socket == nullptr ? "" : notify_socket, TellEverySeconds(std::getenv("WATCHDOG_USEC")));
}

int BadConfig(const absl::Status& why) {
  absl::FPrintF(stderr, "ballastd: %s\n", why.message());
  return absl::IsInvalidArgument(why) ? kBadFlag : kBadConfig;
}

// What the configuration names for TLS and for access: a restart would not make it right. 0: nothing is wrong.
int CheckFiles(const CommandLine& line) {
  ConfigError wrong = CheckTlsFiles(line.config);
  if (wrong.path.empty() && !line.config.access.empty()) {
    const absl::Status read = AccessList::Read(line.config.access).status();
    if (!read.ok()) wrong = {.path = "access", .problem = std::string(read.message())};
  }
  return wrong.path.empty() ? 0 : BadConfig(ConfigFault(line, wrong.path, wrong.problem));
}

// What a restart may find otherwise, as a volume that is mounted by then: a start that lacks it does not end as one of a
// wrong configuration does.
int CheckLaterFiles(const CommandLine& line) {
  const ConfigError wrong = CheckNamedFiles(line.config);
  return wrong.path.empty() ? 0 : BadConfig(ConfigFault(line, wrong.path, wrong.problem));
}

int Main(const std::vector<std::string>& arguments) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(arguments, Environment());
  if (!line.ok()) return BadConfig(line.status());
  std::string text;
  switch (line->action) {
    case CommandLine::Action::kServe:
      if (const int wrong = CheckFiles(*line); wrong != 0) return wrong;
      return Serve(*line);
    case CommandLine::Action::kCheckConfig:
      if (const int wrong = CheckFiles(*line); wrong != 0) return wrong;
      if (const int wrong = CheckLaterFiles(*line); wrong != 0) return wrong;
      for (const std::string& warning : line->warnings) absl::FPrintF(stderr, "warning: %s\n", warning);
      text = "OK\n";
      break;
    case CommandLine::Action::kPrintConfig:
      text = PrintConfig(line->config);
      break;
    case CommandLine::Action::kHelp:
      text = HelpText();
      break;
    case CommandLine::Action::kVersion:
      text = absl::StrCat("ballastd ", Version(), " (rev ", Revision(), ")\n");
      break;
    case CommandLine::Action::kDescribeMetrics:
      text = Metrics::Describe();
      break;
  }
  return std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0 ? 0 : kCannotStart;
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ballast::OpenStandardDescriptors();
  // Debian builds Abseil with its search for deadlocks on, which every lock pays for; the tests of the server's parts have it.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  ballast::TuneAllocator();
  return ballast::Main({argv + 1, argv + argc});
}
