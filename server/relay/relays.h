// All runs that this daemon relays. Thread-safe; nothing here waits for the upstream, but Stop until its calls are ended.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "ballast/v1/admin.pb.h"
#include "server/config/config.h"
#include "server/convert/relayed_runs.h"
#include "server/device/device_pool.h"
#include "server/follow/version_source.h"
#include "server/metrics/metrics.h"

namespace ballast {

class Relays final : public RelayedRuns {
 public:
  // Begins to follow what config.relay names. Both outlive it.
  Relays(const Config& config, DevicePool* devices, Metrics* metrics);
  ~Relays() override;

  const std::string& upstream() const { return upstream_; }
  v1::RelayInfo info() const override;
  // Errors as of GetRun.
  absl::StatusOr<std::shared_ptr<VersionSource>> Find(const std::string& run_id) const;
  absl::StatusOr<v1::GetRunResponse> GetRun(const std::string& run_id) const override;
  std::vector<v1::RunStatus> ListRuns() const override;
  // What this daemon answers to those who would train here.
  absl::Status Refusal() const;
  double busy_s() const;
  // Readers end with this status. Once.
  void Stop(const absl::Status& why);

 private:
  struct Shared;
  absl::StatusOr<const class Relay*> Of(const std::string& run_id) const;

  const std::string upstream_;
  const std::unique_ptr<Shared> shared_;  // by all of them
  std::vector<std::unique_ptr<class Relay>> relays_;
};

}  // namespace ballast
