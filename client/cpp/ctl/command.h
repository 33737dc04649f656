// ballastctl's commands: what each is given, and what it may return. A command prints its answer to `out`, why it could
// not to `err`, and returns the program's exit code.
#pragma once

#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/cpp/client.h"

namespace ballast::ctl {

enum ExitCode : int {
  kOk = 0,
  kRefused = 1,  // the daemon said no, it is unhealthy, a checkpoint is damaged, or what is printed cannot be written
  kUsage = 64,   // EX_USAGE
  kUnreachable = 69,  // EX_UNAVAILABLE
};

struct Flag {
  std::string name;     // without dashes
  std::string value;    // for the help: N, FILE; empty: a switch; NAME...: may come again, which makes a list a,b
  std::string meaning;  // one line
};

struct Invocation {
  std::string server = {};
  bool json = false;
  double timeout_s = 3;
  ClientTls tls = {};
  std::string token_file = {};
  std::vector<std::string> arguments = {};
  std::map<std::string, std::string> flags = {};  // those given; switches have the value "true"
  std::ostream& out;
  std::ostream& err;

  bool Has(const std::string& flag) const { return flags.contains(flag); }
  std::string Get(const std::string& flag, const std::string& otherwise) const {
    const auto found = flags.find(flag);
    return found == flags.end() ? otherwise : found->second;
  }
};

struct Command {
  std::string name;
  std::vector<std::string> arguments;  // names of the positional ones, all required
  std::string summary;
  std::string details;  // after the summary in the command's own help
  std::vector<Flag> flags;
  bool prints_json = true;  // else it refuses --json
  int (*run)(const Invocation&);
};

Command StatusCommand();
Command RunsCommand();
Command RunCommand();
Command WatchCommand();
Command ExplainCommand();
Command HistoryCommand();
Command PlanCommand();
Command DoctorCommand();
Command RewindCommand();
Command CheckpointCommand();
Command CheckpointsCommand();
Command RestoreCommand();
Command VerifyCommand();
Command FollowCommand();
Command TagCommand();
Command UntagCommand();
Command VersionsCommand();
Command DiffCommand();
Command DeleteCommand();
Command HealthCommand();
Command CertsCommand();
Command TokenCommand();

// The same for each of the daemons that --server names.
std::vector<Invocation> OfEachDaemon(const Invocation& invocation);
// Of a connection to the daemon that is meant. INVALID_ARGUMENT: none is named, or what no daemon can be at.
absl::StatusOr<ClientOptions> OptionsOf(const Invocation& invocation);
absl::StatusOr<std::unique_ptr<Client>> Connect(const Invocation& invocation);
// Before a run is taken back. FAILED_PRECONDITION: the daemon has a part of it, and the command names no other.
absl::Status CheckWhole(const Invocation& invocation, Client& client, const std::string& run_id);
// The error of a connection, with its fix worded for the command line.
absl::Status InCommandLine(const absl::Status& status);
// Whether it is --server that is wrong, of OptionsOf and Connect.
bool IsMisuse(const absl::Status& status);
// Prints the error; returns its exit code.
int Fail(const Invocation& invocation, const absl::Status& status);
// Prints what is wrong with the command line, and which help to read; returns the exit code.
int Misused(std::ostream& err, const absl::Status& status, const std::string& command = "");
// `name`: what the number is called in the error, such as --steps or STEP.
absl::StatusOr<uint64_t> WholeNumber(const std::string& name, const std::string& text);
// The flag --days, from 1 to 3650: how long what is made is valid.
absl::StatusOr<absl::Duration> Days(const Invocation& invocation, const std::string& otherwise);
// A protobuf message as JSON, with the proto's field names and zeros in place.
int PrintJson(const Invocation& invocation, const google::protobuf::Message& message);
// The same in one line, at once: of messages that come one after another.
int PrintJsonLine(const Invocation& invocation, const google::protobuf::Message& message);

}  // namespace ballast::ctl
