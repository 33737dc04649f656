#include "server/config/relay_check.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/run_names.h"

#include "server/config/config_check.h"

namespace ballast {
namespace {

constexpr char kWantsUpstream[] = "wants relay.upstream: without it the daemon is no relay";

std::string CheckFile(const Config& config, const std::string& file) {
  if (file.empty()) return "";
  if (!config.relay.on()) return kWantsUpstream;
  return absl::StartsWith(file, "/") ? "" : absl::StrCat("'", file, "' is no absolute path of a file");
}

bool IsUnix(const Config& config) { return absl::StartsWith(config.relay.upstream, "unix:"); }

}  // namespace

std::string CheckUpstream(const Config& config) {
  const Config::Relay& relay = config.relay;
  if (!relay.on()) return "";
  if (config.storage.on())
    return "does not go with storage.dir: a relay keeps nothing on the disk; leave one of them out";
  if (config.device != "auto" && config.device != "cpu") {
    return absl::StrCat("does not go with device: ", config.device, ": a relay computes nothing; leave device out");
  }
  if (IsUnix(config)) {
    return absl::StartsWith(relay.upstream, "unix:/") ? "" : absl::StrCat("'", relay.upstream, "' is no unix:/PATH");
  }
  const absl::StatusOr<HostPort> parsed = ParseHostPort(relay.upstream);
  if (!parsed.ok()) return std::string(parsed.status().message());
  return parsed->port == 0 ? "has port 0, at which nobody listens" : "";
}

std::string CheckRelayedRuns(const Config& config) {
  const Config::Relay& relay = config.relay;
  if (!relay.on()) return relay.runs.empty() ? "" : kWantsUpstream;
  if (relay.runs.empty()) return "is empty: name the runs that the relay is to follow";
  if (relay.runs.size() > config.max_runs) {
    return absl::StrCat("names ", relay.runs.size(), " runs, and max_runs is ", config.max_runs);
  }
  std::set<std::string> ids;
  for (const std::string& id : relay.runs) {
    if (id.empty()) return "names a run without an id";
    if (!IsRunName(id)) return absl::StrCat("names '", id, "', as no run is called; wanted: ", kRunNameRule);
    if (!ids.insert(id).second) return absl::StrCat("names '", id, "' twice");
  }
  return "";
}

std::string CheckRelayCa(const Config& config) { return CheckFile(config, config.relay.ca); }

std::string CheckRelayCertificate(const Config& config) {
  const Config::Relay& relay = config.relay;
  if (std::string wrong = CheckFile(config, relay.certificate); !wrong.empty() || relay.certificate.empty())
    return wrong;
  return relay.ca.empty()    ? "wants relay.ca: without it there is no TLS"
         : relay.key.empty() ? "wants relay.key: the file of its key"
                             : "";
}

std::string CheckRelayKey(const Config& config) {
  const Config::Relay& relay = config.relay;
  if (std::string wrong = CheckFile(config, relay.key); !wrong.empty() || relay.key.empty()) return wrong;
  return relay.certificate.empty() ? "wants relay.certificate, whose key it is" : "";
}

std::string CheckRelayToken(const Config& config) {
  const Config::Relay& relay = config.relay;
  if (std::string wrong = CheckFile(config, relay.token_file); !wrong.empty() || relay.token_file.empty()) return wrong;
  if (!relay.ca.empty() || IsUnix(config)) return "";
  return "wants relay.ca, or an upstream at unix:/PATH: tokens are sent over TLS or a Unix socket alone";
}

}  // namespace ballast
