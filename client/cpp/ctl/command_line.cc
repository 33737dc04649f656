#include "client/cpp/ctl/command_line.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/unix_address.h"

namespace ballast::ctl {
namespace {

std::vector<Command> Commands() {
  return {StatusCommand(),      RunsCommand(),    RunCommand(),    WatchCommand(),  ExplainCommand(),
          HistoryCommand(),     PlanCommand(),    DoctorCommand(), RewindCommand(), CheckpointCommand(),
          CheckpointsCommand(), RestoreCommand(), VerifyCommand(), DeleteCommand(), HealthCommand(),
          CertsCommand(),       TokenCommand(),   FollowCommand(), TagCommand(),    UntagCommand(),
          VersionsCommand(),    DiffCommand()};
}

std::vector<Flag> CommonFlags() {
  return {{"server", "HOST:PORT",
           "the daemon, or a run's several with commas between; default $BALLAST_SERVER, else localhost:7700"},
          {"json", "", "print JSON instead of a table"},
          {"timeout", "SECONDS", "how long to wait for the daemon to answer; default 3"},
          {"tls-ca", "FILE", "TLS: the authority of the daemon's certificate; default $BALLAST_TLS_CA"},
          {"tls-certificate", "FILE", "the client's certificate; default $BALLAST_TLS_CERTIFICATE"},
          {"tls-key", "FILE", "its key; default $BALLAST_TLS_KEY"},
          {"token-file", "FILE", "the file of the token that the daemon asks for; default $BALLAST_TOKEN_FILE"},
          {"help", "", "this text"},
          {"version", "", "ballastctl's version"}};
}

std::string Usage(const Command& command) {
  std::string usage = absl::StrCat("ballastctl ", command.name);
  for (const std::string& argument : command.arguments) absl::StrAppend(&usage, " ", argument);
  if (!command.flags.empty()) usage += " [flags]";
  return usage;
}

void PrintFlags(const std::vector<Flag>& flags, std::ostream& out) {
  for (const Flag& flag : flags) {
    const std::string left = absl::StrCat("--", flag.name, flag.value.empty() ? "" : " ", flag.value);
    out << absl::StrFormat("  %-22s %s\n", left, flag.meaning);
  }
}

void PrintHelp(std::ostream& out) {
  out << "ballastctl: look at a ballastd, the daemon that holds optimizer state\n\n"
         "usage: ballastctl [flags] COMMAND ...\n\ncommands:\n";
  for (const Command& command : Commands()) {
    const std::string left = absl::StrJoin(command.arguments, " ", [&](std::string* s, const auto& a) { *s += a; });
    out << absl::StrFormat("  %-22s %s\n", absl::StrCat(command.name, " ", left), command.summary);
  }
  out << "\nflags:\n";
  PrintFlags(CommonFlags(), out);
  out << "\nexit codes: 0 done, 1 refused, unhealthy or damaged, 64 wrong command line, 69 no daemon answers\n"
         "`ballastctl COMMAND --help` says more of a command.\n";
}

void PrintHelp(const Command& command, std::ostream& out) {
  out << Usage(command) << "\n\n" << command.summary << "\n";
  if (!command.details.empty()) out << "\n" << command.details;
  if (!command.flags.empty()) out << "\nflags:\n";
  PrintFlags(command.flags, out);
  out << "\nflags of every command:\n";
  PrintFlags(CommonFlags(), out);
}

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

absl::Status Unknown(const char* what, const std::string& word, const std::vector<std::string>& candidates) {
  const std::vector<std::string> near = Nearest(word, candidates);
  if (near.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown ", what, " '", word, "'; there are: ", absl::StrJoin(candidates, ", ")));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown ", what, " '", word, "'; did you mean ", absl::StrJoin(near, " or "), "?"));
}

// The words sorted into flags and the rest. Which flags there are depends on the command, wherever it stands.
struct Sorted {
  const Command* command = nullptr;
  std::vector<std::string> rest;
  std::map<std::string, std::string> flags;
};

// Whether some command has a flag of this name with a value that `is_meant`.
template <typename Meant>
bool AnyFlag(const std::vector<Command>& commands, const std::string& name, Meant is_meant) {
  const auto matches = [&](const Flag& flag) { return flag.name == name && is_meant(flag.value); };
  const std::vector<Flag> common = CommonFlags();
  if (std::any_of(common.begin(), common.end(), matches)) return true;
  return std::any_of(commands.begin(), commands.end(), [&](const Command& command) {
    return std::any_of(command.flags.begin(), command.flags.end(), matches);
  });
}

bool TakesValue(const std::vector<Command>& commands, const std::string& name) {
  return AnyFlag(commands, name, [](const std::string& value) { return !value.empty(); });
}

// The last value counts; of a flag that may come again, all do. No flag means anything by an empty value, which is what a
// shell makes of a variable that is not set: what was meant by it must not be taken for a flag left out.
absl::Status Take(const std::vector<Command>& commands, const std::string& name, const std::string& value,
                  std::map<std::string, std::string>* flags) {
  if (value.empty() && TakesValue(commands, name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, " is empty: give it a value, or leave it out; is a variable of the shell not set?"));
  }
  const bool repeats = AnyFlag(commands, name, [](const std::string& v) { return v.ends_with("..."); });
  std::string& taken = (*flags)[name];
  taken = repeats && !taken.empty() ? absl::StrCat(taken, ",", value) : value;
  return absl::OkStatus();
}

absl::StatusOr<Sorted> Sort(const std::vector<Command>& commands, const std::vector<std::string>& words) {
  Sorted sorted;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string word = words[i] == "-h" ? "--help" : words[i];
    if (!word.starts_with("--")) {
      sorted.rest.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    absl::Status taken;
    if (equals != std::string::npos) {
      taken = Take(commands, name, word.substr(equals + 1), &sorted.flags);
    } else if (!TakesValue(commands, name)) {
      sorted.flags[name] = "true";
    } else if (i + 1 < words.size()) {
      taken = Take(commands, name, words[++i], &sorted.flags);
    } else {
      taken = absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
    }
    if (!taken.ok()) return taken;
  }
  if (sorted.rest.empty()) return sorted;
  std::vector<std::string> names;
  for (const Command& command : commands) {
    names.push_back(command.name);
    if (command.name == sorted.rest[0]) sorted.command = &command;
  }
  if (sorted.command == nullptr) return Unknown("command", sorted.rest[0], names);
  sorted.rest.erase(sorted.rest.begin());
  return sorted;
}

absl::Status CheckFlags(const Sorted& sorted) {
  std::vector<Flag> known = CommonFlags();
  if (sorted.command != nullptr) known.insert(known.end(), sorted.command->flags.begin(), sorted.command->flags.end());
  std::vector<std::string> names;
  for (const Flag& flag : known) names.push_back(absl::StrCat("--", flag.name));
  for (const auto& [name, value] : sorted.flags) {
    const auto found =
        std::find_if(known.begin(), known.end(), [&name = name](const Flag& flag) { return flag.name == name; });
    if (found == known.end()) return Unknown("flag", absl::StrCat("--", name), names);
    if (found->value.empty() && value != "true") {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " is a switch and takes no value, got '", value, "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckJson(const Sorted& sorted) {
  if (sorted.command->prints_json || !sorted.flags.contains("json")) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(sorted.command->name, " prints no JSON; leave out --json"));
}

absl::Status CheckArguments(const Sorted& sorted) {
  if (sorted.rest.size() == sorted.command->arguments.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("got ", sorted.rest.size(), " arguments, wanted ",
                                                 sorted.command->arguments.size(), ": ", Usage(*sorted.command)));
}

// Variables are for daemons at a port: a Unix socket knows no TLS.
ClientTls TlsOf(const Invocation& invocation, const Environment& environment) {
  const auto file = [&](const std::string& flag, const char* variable) {
    const bool at_port = !IsUnixAddress(invocation.server);
    return invocation.Get(flag, at_port ? environment(variable).value_or("") : "");
  };
  return {.ca = file("tls-ca", "BALLAST_TLS_CA"),
          .certificate = file("tls-certificate", "BALLAST_TLS_CERTIFICATE"),
          .key = file("tls-key", "BALLAST_TLS_KEY")};
}

}  // namespace

std::vector<std::string> Nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::vector<std::pair<size_t, std::string>> near;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(word, candidate);
    const bool begins = word.size() > 1 && candidate.starts_with(word);
    if (begins || distance <= std::max<size_t>(1, candidate.size() / 3)) near.emplace_back(distance, candidate);
  }
  std::sort(near.begin(), near.end());
  std::vector<std::string> names;
  for (const auto& [distance, name] : near) names.push_back(name);
  return names;
}

int Main(const std::vector<std::string>& words, const Environment& environment, std::ostream& out, std::ostream& err) {
  const std::vector<Command> commands = Commands();
  const auto sorted = Sort(commands, words);
  if (!sorted.ok()) return Misused(err, sorted.status());
  if (auto s = CheckFlags(*sorted); !s.ok()) return Misused(err, s);
  if (sorted->flags.contains("version")) {
    out << "ballastctl " BALLAST_CLIENT_VERSION "\n";
    return kOk;
  }
  if (sorted->command == nullptr || sorted->flags.contains("help")) {
    const bool asked = sorted->flags.contains("help");
    sorted->command != nullptr ? PrintHelp(*sorted->command, out) : PrintHelp(asked ? out : err);
    return asked ? kOk : kUsage;
  }
  if (auto s = CheckArguments(*sorted); !s.ok()) return Misused(err, s);
  if (auto s = CheckJson(*sorted); !s.ok()) return Misused(err, s, sorted->command->name);
  Invocation invocation{.arguments = sorted->rest, .flags = sorted->flags, .out = out, .err = err};
  invocation.server = invocation.Get("server", environment("BALLAST_SERVER").value_or("localhost:7700"));
  invocation.json = invocation.Has("json");
  invocation.tls = TlsOf(invocation, environment);
  invocation.token_file = invocation.Get("token-file", environment("BALLAST_TOKEN_FILE").value_or(""));
  const std::string timeout = invocation.Get("timeout", "3");
  if (!absl::SimpleAtod(timeout, &invocation.timeout_s) || !(invocation.timeout_s > 0)) {
    return Misused(
        err, absl::InvalidArgumentError(absl::StrCat("--timeout is '", timeout, "'; wanted seconds, more than 0")));
  }
  return sorted->command->run(invocation);
}

}  // namespace ballast::ctl
