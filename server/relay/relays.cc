#include "server/relay/relays.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/status_macros.h"
#include "server/relay/relay.h"

namespace ballast {

struct Relays::Shared {
  RelayMemory memory;
  RelayPath path;
};

Relays::Relays(const Config& config, DevicePool* devices, Metrics* metrics)
    : upstream_(config.relay.upstream),
      shared_(new Shared{.memory = RelayMemory(devices, metrics), .path = RelayPath(config.relay.upstream)}) {
  for (const std::string& run_id : config.relay.runs) {
    relays_.push_back(std::make_unique<Relay>(Relay::Options{.run_id = run_id,
                                                             .relay = config.relay,
                                                             .limits = config.limits,
                                                             .metrics = metrics,
                                                             .memory = &shared_->memory,
                                                             .path = &shared_->path}));
  }
}

Relays::~Relays() = default;

v1::RelayInfo Relays::info() const { return shared_->path.info(); }

absl::StatusOr<const Relay*> Relays::Of(const std::string& run_id) const {
  for (const auto& relay : relays_) {
    if (relay->run_id() == run_id) return relay.get();
  }
  return absl::NotFoundError(absl::StrCat("this daemon is a relay of ", upstream_, ", and run '", run_id,
                                          "' is none of those that it relays (relay.runs)"));
}

absl::StatusOr<std::shared_ptr<VersionSource>> Relays::Find(const std::string& run_id) const {
  ASSIGN_OR_RETURN(const Relay* relay, Of(run_id));
  ASSIGN_OR_RETURN(std::shared_ptr<RelayedRun> run, relay->Find());
  return run;
}

absl::StatusOr<v1::GetRunResponse> Relays::GetRun(const std::string& run_id) const {
  ASSIGN_OR_RETURN(const Relay* relay, Of(run_id));
  return relay->GetRun();
}

std::vector<v1::RunStatus> Relays::ListRuns() const {
  std::vector<v1::RunStatus> runs;
  for (const auto& relay : relays_) runs.push_back(relay->Status());
  return runs;
}

absl::Status Relays::Refusal() const {
  return absl::FailedPreconditionError(
      absl::StrCat("this daemon is a relay of ", upstream_,
                   ", and serves the newest versions of weights alone, as they are served; "
                   "train, and ask for all else, there"));
}

double Relays::busy_s() const {
  double most = 0;
  for (const auto& relay : relays_) most = std::max(most, relay->busy_s());
  return most;
}

void Relays::Stop(const absl::Status& why) {
  for (const auto& relay : relays_) relay->Stop(why);
}

}  // namespace ballast
