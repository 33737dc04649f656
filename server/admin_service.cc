#include "server/admin_service.h"

#include <utility>

#include "server/convert.h"
#include "server/server.h"
#include "server/status_macros.h"
#include "server/trainer_service.h"
#include "server/version.h"

namespace ballast {

grpc::ServerUnaryReactor* AdminService::Answer(grpc::CallbackServerContext* context, RpcRecord record,
                                               const absl::Status& status) {
  auto* reactor = context->DefaultReactor();
  record.Done(status);
  reactor->Finish(ToGrpc(status));
  return reactor;
}

v1::GetServerResponse AdminService::DescribeServer() const {
  v1::GetServerResponse out;
  const Runs& runs = *options_.environment.runs;
  out.set_version(Version());
  out.set_revision(Revision());
  const Devices& devices = *options_.environment.devices;
  out.set_device(devices.description());
  out.set_memory_limit_bytes(devices.limit_bytes());
  out.set_memory_reserved_bytes(devices.reserved_bytes());
  for (const Devices::State& state : devices.Read()) *out.add_devices() = FromDevice(state);
  out.set_uptime_s(MonotonicSeconds() - begin_s_);
  out.set_protocol_min(kProtocolMin);
  out.set_protocol_max(kProtocolMax);
  out.set_ops_address(options_.ops_address);
  for (const char* name : kernels::RuleNames()) out.add_rules(name);
  for (const kernels::Master& master : kernels::Masters()) out.add_masters(master.name);
  for (const kernels::State& state : kernels::States()) out.add_states(state.name);
  for (const kernels::WireFormat& format : kernels::WireFormats()) {
    out.add_wire_formats(format.name);
    if (format.gradient) out.add_gradient_formats(format.name);
    if (format.serving) out.add_serving_formats(format.name);
  }
  out.set_state(runs.draining() ? "draining" : "serving");
  out.set_max_runs(runs.max_runs());
  return out;
}

v1::ListRunsResponse AdminService::DescribeRuns() const {
  v1::ListRunsResponse out;
  const uint64_t free_bytes = options_.environment.devices->free_bytes();
  for (const auto& run : options_.environment.runs->All()) *out.add_runs() = FromRun(*run, free_bytes);
  return out;
}

absl::StatusOr<v1::GetRunResponse> AdminService::DescribeRun(const std::string& run_id) const {
  ASSIGN_OR_RETURN(const auto run, options_.environment.runs->Find(run_id));
  v1::GetRunResponse out;
  *out.mutable_status() = FromRun(*run, options_.environment.devices->free_bytes());
  if (!out.mutable_spec()->ParseFromString(run->canonical_spec())) {
    return absl::InternalError("the stored spec cannot be read");
  }
  return out;
}

absl::StatusOr<v1::GetHistoryResponse> AdminService::DescribeHistory(const v1::GetHistoryRequest& request) const {
  ASSIGN_OR_RETURN(const auto run, options_.environment.runs->Find(request.run_id()));
  const size_t most = request.most_steps() == 0 ? RunHistory::kSteps : request.most_steps();
  return FromHistory(*run, request.after_step(), most);
}

grpc::ServerUnaryReactor* AdminService::GetServer(grpc::CallbackServerContext* context, const v1::GetServerRequest*,
                                                  v1::GetServerResponse* response) {
  RpcRecord record(options_.environment.metrics, "GetServer", context->peer());
  *response = DescribeServer();
  return Answer(context, record, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::ListRuns(grpc::CallbackServerContext* context, const v1::ListRunsRequest*,
                                                 v1::ListRunsResponse* response) {
  RpcRecord record(options_.environment.metrics, "ListRuns", context->peer());
  *response = DescribeRuns();
  return Answer(context, record, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetRun(grpc::CallbackServerContext* context, const v1::GetRunRequest* request,
                                               v1::GetRunResponse* response) {
  return AnswerInTurn(options_.environment, context, "GetRun", request->run_id(), *request,
                      [=, this](PendingCall call, const auto&) {
                        auto run = DescribeRun(request->run_id());
                        if (run.ok()) *response = *std::move(run);
                        call.Finish(run.status());
                      });
}

grpc::ServerUnaryReactor* AdminService::DeleteRun(grpc::CallbackServerContext* context,
                                                  const v1::DeleteRunRequest* request,
                                                  v1::DeleteRunResponse* response) {
  RpcRecord record(options_.environment.metrics, "DeleteRun", context->peer());
  record.set_run_id(request->run_id());
  auto* reactor = context->DefaultReactor();
  const auto mode = request->force() ? Runs::Mode::kForce : Runs::Mode::kIdleOnly;
  options_.environment.runs->Delete(request->run_id(), mode,
                                    [reactor, response, record](const absl::StatusOr<uint64_t>& freed) mutable {
                                      if (freed.ok()) response->set_freed_bytes(*freed);
                                      record.Done(freed.status());
                                      reactor->Finish(ToGrpc(freed.status()));
                                    });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::Rewind(grpc::CallbackServerContext* context, const v1::RewindRequest* request,
                                               v1::RewindResponse* response) {
  RpcRecord record(options_.environment.metrics, "Rewind", context->peer());
  record.set_run_id(request->run_id());
  const auto run = options_.environment.runs->Find(request->run_id());
  if (!run.ok()) return Answer(context, record, run.status());
  auto* reactor = context->DefaultReactor();
  (*run)->Rewind(ToRewindOrder(*request), [reactor, response, record](const absl::StatusOr<Rewound>& rewound) mutable {
    if (rewound.ok()) {
      response->set_step(rewound->step);
      response->set_generation(rewound->generation);
    }
    record.Done(rewound.status());
    reactor->Finish(ToGrpc(rewound.status()));
  });
  return reactor;
}

v1::RunPlan AdminService::PlanNow(const RunSpec& spec) const {
  const Devices& devices = *options_.environment.devices;
  auto placement = ChoosePlacement(spec, devices.FreeBytes(), devices.host_free_bytes());
  // What fits nowhere is shown in one piece.
  if (!placement) return FromPlan(MakePlan(spec), {}, devices.free_bytes());
  const std::vector<std::string> labels = DeviceLabels(devices.Of(*placement));
  return FromPlan(MakePlan(spec, *std::move(placement)), labels, devices.free_bytes());
}

grpc::ServerUnaryReactor* AdminService::Plan(grpc::CallbackServerContext* context, const v1::PlanRequest* request,
                                             v1::PlanResponse* response) {
  return AnswerInTurn(options_.environment, context, "Plan", request->spec().run_id(), *request,
                      [=, this](PendingCall call, const auto&) {
                        const auto spec = ToRunSpec(request->spec(), options_.limits);
                        if (spec.ok()) *response->mutable_plan() = PlanNow(*spec);
                        call.Finish(spec.status());
                      });
}

grpc::ServerUnaryReactor* AdminService::GetHistory(grpc::CallbackServerContext* context,
                                                   const v1::GetHistoryRequest* request,
                                                   v1::GetHistoryResponse* response) {
  return AnswerInTurn(options_.environment, context, "GetHistory", request->run_id(), *request,
                      [=, this](PendingCall call, const auto&) {
                        auto history = DescribeHistory(*request);
                        if (history.ok()) *response = *std::move(history);
                        call.Finish(history.status());
                      });
}

}  // namespace ballast
