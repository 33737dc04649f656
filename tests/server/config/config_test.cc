#include "server/config/config.h"

#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/config/config_check.h"
#include "server/config/config_file.h"
#include "server/config/config_keys.h"
#include "server/config/config_schema.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

using Arguments = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(directory_); }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Write(const std::string& text) const {
    const std::string file = (directory_ / "ballast.yaml").string();
    std::ofstream(file) << text;
    return file;
  }

  std::string ErrorOfFile(const std::string& text) const {
    return std::string(ParseConfigText(text, "ballast.yaml").status().message());
  }

  // Of what it says, too.
  std::string ErrorOf(const std::string& text) const {
    return std::string(ParseCommandLine({"--config", Write(text)}, {}).status().message());
  }

  const std::filesystem::path directory_ =
      std::filesystem::temp_directory_path() /
      (std::string("ballast_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(ConfigTest, DefaultsAreLoopbackAndValid) {
  const auto line = ParseCommandLine({}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.listen, "127.0.0.1:7700");
  EXPECT_EQ(line->config.ops_http.listen, "127.0.0.1:9464");
  EXPECT_EQ(line->config.memory_limit, 0u);
  EXPECT_THAT(line->config.log.format, ::testing::AnyOf("text", "json"));
  EXPECT_THAT(line->warnings, IsEmpty());
}

TEST_F(ConfigTest, FlagsWinOverEnvironmentOverFileOverDefaults) {
  const std::string file = Write("max_runs: 2\nthreads: 2\nlimits:\n  layer_groups: 2\n");
  const auto line = ParseCommandLine({"--config", file, "--max_runs=4"},
                                     Environment{{"BALLAST_MAX_RUNS", "3"}, {"BALLAST_THREADS", "3"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.max_runs, 4u);
  EXPECT_EQ(line->config.threads, 3u);
  EXPECT_EQ(line->config.limits.layer_groups, 2u);
  EXPECT_EQ(line->config.limits.tensors, 100000u);
  EXPECT_EQ(line->config_file, file);
}

TEST_F(ConfigTest, FlagsAreSpelledWithDotsHyphensOrUnderscores) {
  for (const Arguments& arguments :
       {Arguments{"--limits.chunk_bytes=512KiB"}, Arguments{"--limits.chunk-bytes", "512KiB"},
        Arguments{"--limits-chunk-bytes=524288"}}) {
    const auto line = ParseCommandLine(arguments, {});
    ASSERT_TRUE(line.ok()) << line.status();
    EXPECT_EQ(line->config.limits.chunk_bytes, 524288u);
  }
}

TEST_F(ConfigTest, SizesDurationsAndSwitchesAreRead) {
  const auto line = ParseCommandLine({"--memory_limit=64MB", "--limits.credit_bytes", "128MiB", "--drain_timeout=1m30s",
                                      "--limits.lease=500ms", "--reflection"},
                                     {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.memory_limit, 64'000'000u);
  EXPECT_EQ(line->config.limits.credit_bytes, 128u << 20);
  EXPECT_EQ(line->config.drain_timeout_s, 90);
  EXPECT_EQ(line->config.limits.lease_s, 0.5);
  EXPECT_TRUE(line->config.reflection);
}

TEST_F(ConfigTest, ErrorsInTheFileNameLineAndFix) {
  EXPECT_EQ(ErrorOfFile("listen: 127.0.0.1:1\n\nops_htp:\n  listen: off\n"),
            "ballast.yaml:3: unknown key 'ops_htp'; did you mean 'ops_http'? valid: listen, device, threads, "
            "memory_limit, max_runs, reflection, ops_http, log, limits, drain_timeout, shm_socket, watchdog, "
            "end_with_stdin, idle_run_timeout, storage, insecure, tls, relay, nccl, access");
  EXPECT_EQ(ErrorOfFile("log:\n  levl: info\n"),
            "ballast.yaml:2: unknown key 'log.levl'; did you mean 'level'? valid: level, format");
  EXPECT_EQ(ErrorOfFile("threads: 1\nthreads: 2\n"),
            "ballast.yaml:2: key 'threads' comes twice, first at ballast.yaml:1; remove one");
  EXPECT_EQ(ErrorOfFile("\nlog: info\n"),
            "ballast.yaml:2: 'log' is a section; indent its keys under it: level, format");
  EXPECT_EQ(ErrorOfFile("device:\n"), "ballast.yaml:1: 'device' wants one value and got nothing");
  EXPECT_EQ(ErrorOfFile("device: [cpu]\n"), "ballast.yaml:1: 'device' wants one value and got a list");
  EXPECT_EQ(ErrorOfFile("device: {a: b}\n"), "ballast.yaml:1: 'device' wants one value and got a section");
  EXPECT_EQ(ErrorOfFile("[a]: b\n"), "ballast.yaml:1: a key must be a plain word");
  EXPECT_THAT(ErrorOfFile("- listen\n"), StartsWith("ballast.yaml:1: wanted 'key: value' lines; valid: listen"));
  EXPECT_THAT(ErrorOfFile("device: cpu\nlisten: [a\n"), AllOf(StartsWith("ballast.yaml:"), HasSubstr("not YAML")));
  EXPECT_THAT(ErrorOfFile("device: cpu\n---\ndevice: cpu\n"), HasSubstr("a second YAML document"));
}

TEST_F(ConfigTest, EmptyFilesAndSectionsAreFine) {
  for (const char* text : {"", "# nothing\n", "limits:\n", "---\n"}) {
    EXPECT_TRUE(ParseConfigText(text, "ballast.yaml").ok()) << text;
  }
  EXPECT_TRUE(ParseCommandLine({"--config", Write("")}, {}).ok());
}

TEST_F(ConfigTest, UnreadableFileIsNamed) {
  const auto line = ParseCommandLine({"--config=/nonexistent/ballast.yaml"}, {});
  EXPECT_EQ(line.status().message(),
            "/nonexistent/ballast.yaml: cannot be read: No such file or directory; name a readable file with --config");
  EXPECT_THAT(std::string(ParseCommandLine({"--config", directory_.string()}, {}).status().message()),
              HasSubstr("Is a directory"));
}

TEST_F(ConfigTest, ValuesOfTheWrongTypeNameTheirSource) {
  const std::string file = Write("device: cpu\nthreads: many\n");
  EXPECT_EQ(ParseCommandLine({"--config", file}, {}).status().message(),
            file + ":2: threads: 'many' is not a whole number");
  const auto environment = ParseCommandLine({}, {{"BALLAST_LIMITS_LEASE", "10"}});
  EXPECT_EQ(environment.status().message(),
            "BALLAST_LIMITS_LEASE: limits.lease: '10' is not a duration; write it as 30s or 500ms");
  EXPECT_FALSE(absl::IsInvalidArgument(environment.status()));
  const auto flag = ParseCommandLine({"--memory-limit=lots"}, {});
  EXPECT_EQ(flag.status().message(), "--memory_limit: 'lots' is not a size; write it as 64MiB, 64MB or bytes");
  EXPECT_TRUE(absl::IsInvalidArgument(flag.status()));
  for (const char* bad : {"--threads=-1", "--threads=1.5", "--threads=4294967296", "--reflection=maybe",
                          "--threads=", "--memory_limit=99999999TiB", "--drain_timeout=-1s", "--drain_timeout=inf"}) {
    EXPECT_FALSE(ParseCommandLine({bad}, {}).ok()) << bad;
  }
}

TEST_F(ConfigTest, ImpossibleValuesAreRefused) {
  for (const char* bad : {"--listen=7700",
                          "--listen=:7700",
                          "--listen=127.0.0.1:70000",
                          "--listen=::1:7700",
                          "--listen=off",
                          "--listen=unix:here.sock",
                          "--listen=unix:",
                          "--ops_http.listen=9464",
                          "--device=gpu",
                          "--device=cuda:",
                          "--device=cuda:x",
                          "--device=cuda:-1",
                          "--device=cuda:0,",
                          "--device=cuda:0,0",
                          "--device=cuda:0,all",
                          "--max_runs=0",
                          "--log.level=loud",
                          "--log.format=xml",
                          "--limits.tensors=0",
                          "--limits.name_bytes=0",
                          "--limits.message_bytes=1KiB",
                          "--limits.message_bytes=8MiB",
                          "--limits.chunk_bytes=0",
                          "--limits.chunk_bytes=1000",
                          "--limits.chunk_bytes=2MiB",
                          "--limits.credit_bytes=16KiB",
                          "--limits.lease=1ms",
                          "--limits.open_timeout=0s",
                          "--limits.layer_groups=257",
                          "--limits.layer_groups=0",
                          "--limits.spec_bytes=100",
                          "--limits.spec_bytes=65MiB",
                          "--limits.pull_timeout=1ms",
                          "--limits.idle_timeout=1ms",
                          "--limits.handshake_timeout=1ms",
                          "--limits.caller_runs=-1",
                          "--limits.caller_bytes=much",
                          "--limits.caller_streams=2000000",
                          "--limits.caller_requests=2000000",
                          "--limits.caller_failures=2000000",
                          "--shm_socket=here.sock",
                          "--drain_timeout=2h",
                          "--idle_run_timeout=300000h"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseCommandLine({bad}, {}).status())) << bad;
  }
  for (const char* good :
       {"--listen=[::1]:7700", "--listen=localhost:0", "--listen=unix:/tmp/here/grpc", "--ops_http.listen=off",
        "--device=cuda:12", "--device=cuda:0,3", "--device=cuda:all", "--limits.chunk_bytes=16KiB", "--drain_timeout=0",
        "--shm_socket=off", "--shm_socket=/tmp/here/"}) {
    EXPECT_TRUE(ParseCommandLine({good}, {}).ok()) << good;
  }
}

TEST_F(ConfigTest, ImpossibleValueInTheFileNamesItsLine) {
  const std::string file = Write("limits:\n  chunk_bytes: 1000\n");
  const auto line = ParseCommandLine({"--config", file}, {});
  EXPECT_EQ(line.status().message(),
            file + ":2: limits.chunk_bytes: 1000 is not a multiple of 16KiB (4096 fp32 elements); choose 1MiB");
  EXPECT_FALSE(absl::IsInvalidArgument(line.status()));
}

TEST_F(ConfigTest, BadFlagsAreNamed) {
  EXPECT_EQ(ParseCommandLine({"--listn=x"}, {}).status().message(), "unknown flag --listn; did you mean '--listen'?");
  EXPECT_EQ(ParseCommandLine({"--qqqqqqqq"}, {}).status().message(), "unknown flag --qqqqqqqq; --help lists the flags");
  EXPECT_THAT(std::string(ParseCommandLine({"serve"}, {}).status().message()), HasSubstr("'serve' is no flag"));
  EXPECT_EQ(ParseCommandLine({"--device"}, {}).status().message(), "--device wants a value");
  EXPECT_EQ(ParseCommandLine({"--check-config=yes"}, {}).status().message(), "--check-config takes no value");
}

TEST_F(ConfigTest, ActionsAreRecognised) {
  using Action = CommandLine::Action;
  const std::map<std::string, Action> actions = {{"--check-config", Action::kCheckConfig},
                                                 {"--print-config", Action::kPrintConfig},
                                                 {"--help", Action::kHelp},
                                                 {"-h", Action::kHelp},
                                                 {"--version", Action::kVersion},
                                                 {"--describe-metrics", Action::kDescribeMetrics}};
  for (const auto& [flag, action] : actions) EXPECT_EQ(ParseCommandLine({flag}, {})->action, action) << flag;
  EXPECT_TRUE(ParseCommandLine({"--help", "--nonsense"}, {{"BALLAST_THREADS", "x"}}).ok());
}

TEST_F(ConfigTest, UnknownVariablesAreWarnedAboutAndThoseOfClientsAreNot) {
  const auto line = ParseCommandLine({}, {{"BALLAST_LISTN", "x"},
                                          {"BALLAST_SERVER", "x"},
                                          {"BALLAST_RUN", "x"},
                                          {"BALLAST_FAILPOINTS", ""},
                                          {"BALLAST_TLS_CA", "/a trainer's"},
                                          {"BALLAST_TLS_CERTIFICATE", "/a trainer's"},
                                          {"BALLAST_TLS_KEY", "/a trainer's"},
                                          {"BALLAST_TOKEN_FILE", "/a trainer's"},
                                          {"PATH", "x"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(line->warnings,
              ElementsAre("the environment variable BALLAST_LISTN is not read; did you mean 'BALLAST_LISTEN'?"));
  EXPECT_FALSE(line->config.tls.on());
}

TEST_F(ConfigTest, SharedMemoryIsOfferedInTheUsersRuntimeFolder) {
  EXPECT_EQ(ParseCommandLine({}, {{"XDG_RUNTIME_DIR", "/run/user/7"}})->config.shm_socket, "/run/user/7/ballast/");
  const std::string without = ParseCommandLine({}, {})->config.shm_socket;
  EXPECT_EQ(without, geteuid() == 0 ? "/run/ballast/" : "/tmp/ballast-" + std::to_string(geteuid()) + "/");
  EXPECT_EQ(ParseCommandLine({"--shm_socket=off"}, {})->config.shm_socket, "off");
}

TEST_F(ConfigTest, AListIsReadFromFileFlagAndEnvironment) {
  const std::vector<std::string> both = {"vm.lan", "ballast.default.svc"};
  const auto hosts = [&](const std::string& text, const std::vector<std::string>& flags,
                         const std::map<std::string, std::string>& environment) {
    std::vector<std::string> arguments = {"--config", Write(text)};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const auto line = ParseCommandLine(arguments, environment);
    EXPECT_TRUE(line.ok()) << line.status();
    return line.ok() ? line->config.ops_http.hosts : std::vector<std::string>();
  };
  EXPECT_EQ(hosts("ops_http:\n  hosts: [vm.lan, \"ballast.default.svc\"]\n", {}, {}), both);
  EXPECT_EQ(hosts("ops_http:\n  hosts:\n    - vm.lan\n    - ballast.default.svc\n", {}, {}), both);
  EXPECT_EQ(hosts("ops_http:\n  hosts: vm.lan, ballast.default.svc\n", {}, {}), both);
  EXPECT_EQ(hosts("", {"--ops_http.hosts", "vm.lan,ballast.default.svc"}, {}), both);
  EXPECT_EQ(hosts("", {}, {{"BALLAST_OPS_HTTP_HOSTS", "vm.lan,ballast.default.svc"}}), both);
  EXPECT_THAT(hosts("ops_http:\n  hosts: [a]\n", {"--ops_http.hosts", "b"}, {}), ::testing::ElementsAre("b"));
  EXPECT_THAT(hosts("ops_http:\n  hosts: []\n", {}, {}), ::testing::IsEmpty());
  EXPECT_THAT(ErrorOf("ops_http:\n  hosts: [\"a,b\"]\n"), HasSubstr("'a,b' is no host name"));
  EXPECT_EQ(ErrorOfFile("ops_http:\n  hosts: [[a]]\n"),
            "ballast.yaml:2: an item of 'ops_http.hosts' must be a plain word");
  EXPECT_THAT(std::string(ParseCommandLine({"--ops_http.hosts", "vm.lan:9464"}, {}).status().message()),
              HasSubstr("'vm.lan:9464' is no host name"));
}

TEST_F(ConfigTest, ACommandsArgumentsMayHaveCommasAndBackslashes) {
  const std::string storage = "storage:\n  dir: /data\n";
  const std::vector<std::string> wanted = {"/bin/rclone", "--include", "{a,b}\\*", "{folder}", "\\,"};
  const auto line = ParseCommandLine(
      {"--config", Write(storage + "  on_published: [/bin/rclone, --include, '{a,b}\\*', '{folder}', '\\,']\n")}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.storage.on_published, wanted);
  const auto again = ParseCommandLine({"--config", Write(PrintConfig(line->config))}, {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->config.storage.on_published, wanted);
  const auto flag = ParseCommandLine(
      {"--storage.dir=/data", "--storage.on_published=/bin/rclone,--include,{a\\,b}\\*,{folder},\\\\\\,"}, {});
  ASSERT_TRUE(flag.ok()) << flag.status();
  EXPECT_EQ(flag->config.storage.on_published, wanted);
}

TEST_F(ConfigTest, ACommandThatCannotBeMeantIsRefused) {
  const auto error = [&](const std::string& keys) { return ErrorOf("storage:\n" + keys); };
  EXPECT_THAT(error("  on_published: [/bin/true]\n"), HasSubstr("wants storage.dir"));
  EXPECT_THAT(error("  dir: /data\n  on_published: [rclone, copy]\n"),
              HasSubstr("'rclone' is no absolute path of a program"));
  EXPECT_THAT(error("  dir: /data\n  on_published: [/bin/true, '{fodler}']\n"),
              HasSubstr("nothing stands for {fodler}; there are {folder}, {run}, {step} and {number}"));
  EXPECT_THAT(error("  dir: /data\n  on_published_timeout: 0s\n"), HasSubstr("out of range"));
}

TEST_F(ConfigTest, AFolderToImportFromIsNotTheStorageItself) {
  const auto error = [&](const std::string& keys) { return ErrorOf("storage:\n" + keys); };
  EXPECT_THAT(error("  import_dir: /in\n"), HasSubstr("wants storage.dir"));
  EXPECT_THAT(error("  dir: /data\n  import_dir: in\n"), HasSubstr("neither off nor the absolute path"));
  for (const char* within : {"/data", "/data/runs", "/"}) {
    EXPECT_THAT(error(absl::StrCat("  dir: /data\n  import_dir: ", within, "\n")), HasSubstr("storage.dir (/data)"));
  }
  EXPECT_TRUE(ParseCommandLine({"--storage.dir=/data", "--storage.import_dir=/data-in"}, {}).ok());
}

// A value unlike the default for every key: a key that sets no member, or the wrong one, shows here.
TEST_F(ConfigTest, PrintedConfigurationIsReadBackTheSame) {
  const std::string text =
      "listen: \"[::1]:1\"\ndevice: \"cuda:3\"\nthreads: 7\nmemory_limit: 12345\nmax_runs: 5\nreflection: true\n"
      "drain_timeout: 1.5s\nshm_socket: \"/run/here\"\nwatchdog: 1m\nend_with_stdin: true\nidle_run_timeout: "
      "36h\ninsecure: true\nnccl: true\naccess: \"/a.yaml\"\nops_http:\n  listen: \"off\"\n  hosts: "
      "[\"vm.lan\", "
      "\"*\"]\n  tls: true\n  token_file: \"/t\"\nlog:\n  level: \"warn\"\n  "
      "format: \"text\"\nlimits:\n"
      "  tensors: 10\n  name_bytes: 11\n  message_bytes: 1MiB\n  chunk_bytes: 64KiB\n  credit_bytes: 3MiB\n"
      "  lease: 250ms\n  layer_groups: 9\n  open_timeout: 3s\n  spec_bytes: 2MiB\n  connections: 100\n"
      "  pull_timeout: 4s\n  idle_timeout: 1h\n  handshake_timeout: 5s\n  caller_runs: 2\n  caller_bytes: 3GiB\n  "
      "caller_streams: 4\n"
      "  caller_requests: 5\n  caller_failures: 6\nstorage:\n  dir: \"/data\"\n  threads: 3\n  bytes_per_second: "
      "100MiB\n"
      "  on_published: [\"/bin/cp\", \"{folder}\"]\n  on_published_timeout: 5m\n  import_dir: \"/in\"\n"
      "tls:\n  certificate: \"/c\"\n  key: \"/k\"\n  client_ca: \"\"\n  client_certificates: \"none\"\n"
      "relay:\n  upstream: \"\"\n  runs: []\n  readers: 65\n  ca: \"\"\n  certificate: \"\"\n  key: \"\"\n  "
      "token_file: \"\"\n";
  const auto line = ParseCommandLine({"--config", Write(text)}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(PrintConfig(line->config), text);
}

TEST_F(ConfigTest, EveryKeyHasItsOwnVariableAndADocumentedDefault) {
  std::set<std::string> variables;
  const std::string defaults = PrintConfig(Config{});
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_TRUE(variables.insert(key.environment()).second) << key.path;
    EXPECT_EQ(FindConfigKey(key.path), &key);
    const std::vector<std::string> parts = absl::StrSplit(key.path, '.');
    EXPECT_LE(parts.size(), 2u) << key.path << ": PrintConfig knows sections, but none in sections";
    EXPECT_THAT(key.doc, HasSubstr("default")) << key.path;
    EXPECT_THAT(HelpText(), HasSubstr("--" + key.path + " "));
    // The documented default is the default, unless the machine decides it.
    const size_t at = defaults.find(parts.size() == 1 ? parts[0] + ": " : "  " + parts[1] + ": ");
    ASSERT_NE(at, std::string::npos) << key.path;
    std::string value = defaults.substr(defaults.find(": ", at) + 2);
    value = value.substr(0, value.find('\n'));
    if (value.front() == '"') value = value.substr(1, value.size() - 2);
    if (value == "0" || value.empty() || key.path == "ops_http.listen") continue;
    EXPECT_THAT(key.doc, HasSubstr("default " + value)) << key.path;
  }
}

TEST_F(ConfigTest, EveryKeyHasARowAndEveryRowAKey) {
  Config config;
  std::set<ConfigMember> members;
  for (const ConfigKey& key : ConfigKeys()) {
    ASSERT_NE(key.row, nullptr) << key.path << ": config_keys.cc has no row for it";
    const ConfigMember member = key.row->member(config);
    EXPECT_TRUE(members.insert(member).second) << key.path << ": another key sets the same member";
    using Kind = ConfigKey::Kind;
    const bool number = std::holds_alternative<uint32_t*>(member) || std::holds_alternative<uint64_t*>(member);
    EXPECT_EQ(key.kind == Kind::kText, std::holds_alternative<std::string*>(member)) << key.path;
    EXPECT_EQ(key.kind == Kind::kSwitch, std::holds_alternative<bool*>(member)) << key.path;
    EXPECT_EQ(key.kind == Kind::kCount || key.kind == Kind::kBytes, number) << key.path;
    EXPECT_EQ(key.kind == Kind::kSeconds, std::holds_alternative<double*>(member)) << key.path;
  }
  EXPECT_EQ(ConfigRows().size(), ConfigKeys().size());
}

}  // namespace
}  // namespace ballast
