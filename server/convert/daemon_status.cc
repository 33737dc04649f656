#include "server/convert/daemon_status.h"

#include <utility>
#include <vector>

#include "proto/protocol_version.h"

#include "server/base/status_macros.h"
#include "server/base/version.h"
#include "server/convert/convert.h"

namespace ballast {

v1::GetServerResponse DaemonStatus::GetServer() const {
  v1::GetServerResponse out;
  out.set_version(Version());
  out.set_revision(Revision());
  out.set_device(devices_->description());
  out.set_memory_limit_bytes(devices_->limit_bytes());
  out.set_memory_reserved_bytes(devices_->reserved_bytes());
  for (const DevicePool::State& state : devices_->Read()) *out.add_devices() = FromDevice(state);
  out.set_uptime_s(MonotonicSeconds() - begin_s_);
  out.set_protocol_min(kProtocolMin);
  out.set_protocol_max(kProtocolMax);
  out.set_ops_address(ops_address_);
  out.set_ops_tls(ops_tls_);
  for (const char* name : kernels::RuleNames()) out.add_rules(name);
  for (const kernels::MasterFormat& master : kernels::MasterFormats()) out.add_masters(master.name);
  for (const kernels::MomentFormat& state : kernels::MomentFormats()) out.add_states(state.name);
  for (const kernels::WireFormat& format : kernels::WireFormats()) {
    out.add_wire_formats(format.name);
    if (format.gradient) out.add_gradient_formats(format.name);
    if (format.serving) out.add_serving_formats(format.name);
  }
  out.set_state(runs_->draining() ? "draining" : "serving");
  out.set_max_runs(runs_->max_runs());
  if (relayed_ != nullptr) *out.mutable_relay() = relayed_->info();
  return out;
}

v1::ListRunsResponse DaemonStatus::ListRuns() const {
  v1::ListRunsResponse out;
  const uint64_t free_bytes = devices_->free_bytes();
  for (const auto& run : runs_->All()) *out.add_runs() = FromRun(*run, free_bytes);
  if (relayed_ == nullptr) return out;
  for (v1::RunStatus& run : relayed_->ListRuns()) out.add_runs()->Swap(&run);
  return out;
}

absl::StatusOr<v1::GetRunResponse> DaemonStatus::GetRun(const std::string& run_id) const {
  if (relayed_ != nullptr) return relayed_->GetRun(run_id);
  ASSIGN_OR_RETURN(const auto run, runs_->Find(run_id));
  v1::GetRunResponse out;
  *out.mutable_status() = FromRun(*run, devices_->free_bytes());
  if (!out.mutable_spec()->ParseFromString(run->canonical_spec())) {
    return absl::InternalError("the stored spec cannot be read");
  }
  out.set_spec_sha256(run->spec_sha256());
  return out;
}

absl::StatusOr<v1::GetHistoryResponse> DaemonStatus::GetHistory(const v1::GetHistoryRequest& request) const {
  if (relayed_ != nullptr) return v1::GetHistoryResponse();
  ASSIGN_OR_RETURN(const auto run, runs_->Find(request.run_id()));
  const size_t most = request.most_steps() == 0 ? RunHistory::kSteps : request.most_steps();
  return FromHistory(*run, request.after_step(), most);
}

v1::RunPlan DaemonStatus::PlanRun(const RunSpec& spec) const {
  auto placement = ChoosePlacement(spec, devices_->FreeBytes(), devices_->host_free_bytes());
  // A run that fits nowhere is shown on one device.
  if (!placement) return FromPlan(MakePlan(spec), {}, devices_->free_bytes());
  const std::vector<std::string> labels = DeviceLabels(devices_->Of(*placement));
  return FromPlan(MakePlan(spec, *std::move(placement)), labels, devices_->free_bytes());
}

}  // namespace ballast
