#include "server/config/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

#include "server/base/status_macros.h"
#include "server/config/config_check.h"
#include "server/config/config_file.h"
#include "server/config/config_schema.h"

namespace ballast {
namespace {

// Read by the clients and tests, which may share the daemon's environment.
constexpr auto kClientVariables =
    std::to_array<absl::string_view>({"BALLAST_SERVER", "BALLAST_RUN", "BALLAST_FAILPOINTS", "BALLAST_TLS_CA",
                                      "BALLAST_TLS_CERTIFICATE", "BALLAST_TLS_KEY", "BALLAST_TOKEN_FILE"});

struct Value {
  const ConfigKey* key = nullptr;
  std::string text;
};

// The flags as given, before any value is read.
struct Flags {
  CommandLine::Action action = CommandLine::Action::kServe;
  bool immediate = false;  // the action needs no configuration
  std::string config_file;
  std::vector<Value> values;
};

struct ActionFlag {
  absl::string_view name, doc;
  CommandLine::Action action;
  bool immediate;
};
constexpr std::array<ActionFlag, 5> kActionFlags = {{
    {"check-config", "check the configuration, print OK or the error, and exit (0 or 78)",
     CommandLine::Action::kCheckConfig, false},
    {"print-config", "print the configuration in effect as YAML and exit", CommandLine::Action::kPrintConfig, false},
    {"describe-metrics", "print the table of metrics and exit", CommandLine::Action::kDescribeMetrics, true},
    {"help", "print this and exit", CommandLine::Action::kHelp, true},
    {"version", "print the version and exit", CommandLine::Action::kVersion, true},
}};

const ActionFlag* FindAction(absl::string_view name) {
  if (name == "h") name = "help";
  const auto* found =
      std::find_if(kActionFlags.begin(), kActionFlags.end(), [&](const auto& f) { return f.name == name; });
  return found == kActionFlags.end() ? nullptr : found;
}

std::vector<std::string> FlagNames() {
  std::vector<std::string> names = {"--config"};
  for (const ActionFlag& flag : kActionFlags) names.push_back(absl::StrCat("--", flag.name));
  for (const ConfigKey& key : ConfigKeys()) names.push_back(absl::StrCat("--", key.path));
  return names;
}

// The arguments of the command line, one flag at a time.
class FlagReader {
 public:
  explicit FlagReader(const std::vector<std::string>& arguments) : arguments_(arguments) {}

  absl::StatusOr<Flags> Read() {
    for (next_ = 0; next_ < arguments_.size();) {
      RETURN_IF_ERROR(ReadFlag(arguments_[next_++]));
      if (flags_.immediate) break;
    }
    return std::move(flags_);
  }

 private:
  absl::Status ReadFlag(const std::string& argument) {
    absl::string_view name = argument;
    if (!absl::ConsumePrefix(&name, "-")) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", argument, "' is no flag; a configuration file is given as --config FILE"));
    }
    absl::ConsumePrefix(&name, "-");
    std::optional<std::string> attached;
    if (const size_t equals = name.find('='); equals != absl::string_view::npos) {
      attached = std::string(name.substr(equals + 1));
      name = name.substr(0, equals);
    }
    if (const ActionFlag* action = FindAction(name); action != nullptr) return SetAction(*action, attached);
    const ConfigKey* key = FindConfigKey(name);
    if (key == nullptr && name != "config") {
      const std::string near = DidYouMean(absl::StrCat("--", name), FlagNames());
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag --", name, near.empty() ? "; --help lists the flags" : near));
    }
    if (!attached && key != nullptr && key->kind == ConfigKey::Kind::kSwitch) attached = "true";
    if (!attached && next_ < arguments_.size()) attached = arguments_[next_++];
    if (!attached) return absl::InvalidArgumentError(absl::StrCat("--", name, " wants a value"));
    if (key == nullptr && attached->empty()) {
      return absl::InvalidArgumentError("--config wants a file and got nothing; without a file leave the flag out");
    }
    if (key == nullptr) {
      flags_.config_file = *attached;
    } else {
      flags_.values.push_back({key, *attached});
    }
    return absl::OkStatus();
  }

  absl::Status SetAction(const ActionFlag& flag, const std::optional<std::string>& attached) {
    if (attached) return absl::InvalidArgumentError(absl::StrCat("--", flag.name, " takes no value"));
    flags_.action = flag.action;
    flags_.immediate = flag.immediate;
    return absl::OkStatus();
  }

  const std::vector<std::string>& arguments_;
  size_t next_ = 0;
  Flags flags_;
};

// Sets one key's value, and remembers where it comes from, so that what is wrong with it is said there.
absl::Status Apply(const ConfigKey& key, const FileValue& value, CommandLine* line) {
  line->where[key.path] = value.where;
  const absl::Status set =
      value.items ? SetConfigList(key, *value.items, &line->config) : SetConfigValue(key, value.text, &line->config);
  return set.ok() ? set : ConfigFault(*line, key.path, std::string(set.message()));
}

// The sources are applied one after the other, the stronger later.
absl::Status ApplyFile(const std::string& file, CommandLine* line) {
  if (file.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<FileValue> values, ReadConfigFile(file));
  for (const FileValue& value : values) {
    RETURN_IF_ERROR(Apply(*FindConfigKey(value.path), value, line));
  }
  return absl::OkStatus();
}

absl::Status ApplyEnvironment(const std::map<std::string, std::string>& environment, CommandLine* line) {
  std::set<absl::string_view> known(kClientVariables.begin(), kClientVariables.end());
  std::vector<std::string> names;
  for (const ConfigKey& key : ConfigKeys()) {
    names.push_back(key.environment());
    const auto found = environment.find(names.back());
    if (found == environment.end()) continue;
    known.insert(found->first);
    RETURN_IF_ERROR(Apply(key, {key.path, found->second, found->first}, line));
  }
  for (const auto& [name, value] : environment) {
    if (!absl::StartsWith(name, "BALLAST_") || known.count(name) > 0) continue;
    line->warnings.push_back(absl::StrCat("the environment variable ", name, " is not read", DidYouMean(name, names)));
  }
  return absl::OkStatus();
}

std::string RuntimeFolder(const std::map<std::string, std::string>& environment) {
  const auto xdg = environment.find("XDG_RUNTIME_DIR");
  if (xdg != environment.end() && absl::StartsWith(xdg->second, "/")) return absl::StrCat(xdg->second, "/ballast/");
  return geteuid() == 0 ? "/run/ballast/" : absl::StrCat("/tmp/ballast-", geteuid(), "/");
}

// Defaults that the machine decides.
Config Resolve(Config config, const std::map<std::string, std::string>& environment) {
  if (config.log.format.empty()) config.log.format = isatty(STDERR_FILENO) != 0 ? "text" : "json";
  if (config.shm_socket.empty()) config.shm_socket = RuntimeFolder(environment);
  return config;
}

std::string Quoted(const std::string& text) {
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\"", "\\\""}}), "\"");
}

std::string QuotedList(const std::vector<std::string>& items) {
  const auto append = [](std::string* out, const std::string& item) { out->append(Quoted(item)); };
  return absl::StrCat("[", absl::StrJoin(items, ", ", append), "]");
}

}  // namespace

absl::Status ConfigFault(const CommandLine& line, const std::string& path, const std::string& problem) {
  const auto found = line.where.find(path);
  const std::string where = found == line.where.end() ? "default" : found->second;
  const std::string key = absl::EndsWith(where, path) ? "" : absl::StrCat(path, ": ");
  const std::string text = absl::StrCat(where, ": ", key, problem);
  return absl::StartsWith(where, "--") ? absl::InvalidArgumentError(text) : absl::FailedPreconditionError(text);
}

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const std::map<std::string, std::string>& environment) {
  ASSIGN_OR_RETURN(const Flags flags, FlagReader(arguments).Read());
  CommandLine line{.config = {}, .action = flags.action, .config_file = flags.config_file, .warnings = {}, .where = {}};
  if (flags.immediate) return line;

  RETURN_IF_ERROR(ApplyFile(flags.config_file, &line));
  RETURN_IF_ERROR(ApplyEnvironment(environment, &line));
  for (const Value& flag : flags.values) {
    RETURN_IF_ERROR(Apply(*flag.key, {flag.key->path, flag.text, absl::StrCat("--", flag.key->path)}, &line));
  }
  line.config = Resolve(std::move(line.config), environment);
  if (const ConfigError error = CheckConfig(line.config); !error.path.empty()) {
    return ConfigFault(line, error.path, error.problem);
  }
  for (std::string& warning : ConfigWarnings(line.config)) line.warnings.push_back(std::move(warning));
  return line;
}

std::string HelpText() {
  std::string out =
      "ballastd: owns a model's master weights and optimizer state, updates them from the gradients that trainers\n"
      "stream to it, and streams the new weights back.\n\n"
      "usage: ballastd [--config FILE] [--KEY VALUE]...\n\n";
  absl::StrAppendFormat(&out, "  --%-36s %s\n", "config FILE", "read this YAML file");
  for (const ActionFlag& flag : kActionFlags) absl::StrAppendFormat(&out, "  --%-36s %s\n", flag.name, flag.doc);
  out +=
      "\nKeys of the configuration. Flags win over the environment, which wins over the file, which wins over the\n"
      "defaults; the variable of limits.chunk_bytes is BALLAST_LIMITS_CHUNK_BYTES, that of tls.key "
      "BALLAST_DAEMON_TLS_KEY.\n\n";
  for (const ConfigKey& key : ConfigKeys()) {
    absl::StrAppendFormat(&out, "  --%-36s %s\n", absl::StrCat(key.path, " ", key.placeholder()), key.doc);
  }
  return out +
         "\nBYTES: 65536, 64KiB or 64MB; DURATION: 30s or 500ms; LIST: a,b or, in the file, [a, b]. Exit codes: 0 "
         "drained, 1 could not start,\n"
         "64 bad flag, 70 no GPU is left, 71 the watchdog, 74 some run's last steps could not be written,\n"
         "75 stopped by a second signal, 78 bad configuration.\n";
}

std::string PrintConfig(const Config& config) {
  std::string plain, sections, section;
  for (const ConfigKey& key : ConfigKeys()) {
    std::string text = ConfigValueText(key, config);
    if (key.kind == ConfigKey::Kind::kText) text = Quoted(text);
    if (key.kind == ConfigKey::Kind::kList) text = QuotedList(ConfigList(key, config));
    const std::vector<std::string> parts = absl::StrSplit(key.path, '.');
    if (parts.size() == 1) {
      absl::StrAppend(&plain, parts[0], ": ", text, "\n");
      continue;
    }
    if (section != parts[0]) absl::StrAppend(&sections, parts[0], ":\n");
    section = parts[0];
    absl::StrAppend(&sections, "  ", parts[1], ": ", text, "\n");
  }
  return plain + sections;
}

}  // namespace ballast
