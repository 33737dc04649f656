// What the daemon shows of itself, as messages: AdminService's reading calls and the page's JSON answer with these.
//
// Thread-safe; waits for no step.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/run.pb.h"
#include "server/base/clock.h"
#include "server/convert/relayed_runs.h"
#include "server/device/device_pool.h"
#include "server/run/run_registry.h"
#include "server/spec/run_spec.h"

namespace ballast {

class DaemonStatus {
 public:
  // All outlive it. relayed: of a daemon that is a relay, and has no runs of its own; else nullptr. ops_address: where the
  // ops HTTP server listens; may be empty. ops_tls: by HTTPS.
  DaemonStatus(const DevicePool* devices, RunRegistry* runs, const RelayedRuns* relayed, std::string ops_address,
               bool ops_tls)
      : devices_(devices), runs_(runs), relayed_(relayed), ops_address_(std::move(ops_address)), ops_tls_(ops_tls) {}

  v1::GetServerResponse GetServer() const;
  v1::ListRunsResponse ListRuns() const;
  // NOT_FOUND names the runs there are.
  absl::StatusOr<v1::GetRunResponse> GetRun(const std::string& run_id) const;
  // Of a relayed run, nothing: its steps are known where it trains.
  absl::StatusOr<v1::GetHistoryResponse> GetHistory(const v1::GetHistoryRequest& request) const;
  // What the run would take, placed as it would be now.
  v1::RunPlan PlanRun(const RunSpec& spec) const;

 private:
  const DevicePool* const devices_;
  RunRegistry* const runs_;
  const RelayedRuns* const relayed_;
  const std::string ops_address_;
  const bool ops_tls_;
  const double begin_s_ = MonotonicSeconds();
};

}  // namespace ballast
