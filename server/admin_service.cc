#include "server/admin_service.h"

#include <utility>

#include "server/convert.h"
#include "server/server.h"
#include "server/trainer_service.h"
#include "server/version.h"

namespace ballast {

grpc::ServerUnaryReactor* AdminService::Answer(grpc::CallbackServerContext* context, RpcRecord record,
                                               const absl::Status& status) {
  auto* reactor = context->DefaultReactor();
  record.Done(status.code());
  reactor->Finish(ToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::GetServer(grpc::CallbackServerContext* context, const v1::GetServerRequest*,
                                                  v1::GetServerResponse* response) {
  RpcRecord record(options_.environment.metrics, "GetServer");
  const Runs& runs = *options_.environment.runs;
  response->set_version(Version());
  response->set_revision(Revision());
  const Devices& devices = *options_.environment.devices;
  response->set_device(devices.description());
  response->set_memory_limit_bytes(devices.limit_bytes());
  response->set_memory_reserved_bytes(devices.reserved_bytes());
  for (const Devices::State& state : devices.Read()) *response->add_devices() = FromDevice(state);
  response->set_uptime_s(MonotonicSeconds() - begin_s_);
  response->set_protocol_min(kProtocolMin);
  response->set_protocol_max(kProtocolMax);
  response->set_ops_address(options_.ops_address);
  for (const char* name : kernels::RuleNames()) response->add_rules(name);
  for (const kernels::Master& master : kernels::Masters()) response->add_masters(master.name);
  for (const kernels::State& state : kernels::States()) response->add_states(state.name);
  for (const kernels::WireFormat& format : kernels::WireFormats()) {
    response->add_wire_formats(format.name);
    if (format.gradient) response->add_gradient_formats(format.name);
    if (format.serving) response->add_serving_formats(format.name);
  }
  response->set_state(runs.draining() ? "draining" : "serving");
  response->set_max_runs(runs.max_runs());
  return Answer(context, record, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::ListRuns(grpc::CallbackServerContext* context, const v1::ListRunsRequest*,
                                                 v1::ListRunsResponse* response) {
  RpcRecord record(options_.environment.metrics, "ListRuns");
  const uint64_t free_bytes = options_.environment.devices->free_bytes();
  for (const auto& run : options_.environment.runs->All()) *response->add_runs() = FromRun(*run, free_bytes);
  return Answer(context, record, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetRun(grpc::CallbackServerContext* context, const v1::GetRunRequest* request,
                                               v1::GetRunResponse* response) {
  RpcRecord record(options_.environment.metrics, "GetRun");
  const auto run = options_.environment.runs->Find(request->run_id());
  if (!run.ok()) return Answer(context, record, run.status());
  *response->mutable_status() = FromRun(**run, options_.environment.devices->free_bytes());
  if (!response->mutable_spec()->ParseFromString((*run)->canonical_spec())) {
    return Answer(context, record, absl::InternalError("the stored spec cannot be read"));
  }
  return Answer(context, record, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::DeleteRun(grpc::CallbackServerContext* context,
                                                  const v1::DeleteRunRequest* request,
                                                  v1::DeleteRunResponse* response) {
  RpcRecord record(options_.environment.metrics, "DeleteRun");
  auto* reactor = context->DefaultReactor();
  const auto mode = request->force() ? Runs::Mode::kForce : Runs::Mode::kIdleOnly;
  options_.environment.runs->Delete(request->run_id(), mode,
                                    [reactor, response, record](const absl::StatusOr<uint64_t>& freed) mutable {
                                      if (freed.ok()) response->set_freed_bytes(*freed);
                                      record.Done(freed.status().code());
                                      reactor->Finish(ToGrpc(freed.status()));
                                    });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::Rewind(grpc::CallbackServerContext* context, const v1::RewindRequest* request,
                                               v1::RewindResponse* response) {
  RpcRecord record(options_.environment.metrics, "Rewind");
  const auto run = options_.environment.runs->Find(request->run_id());
  if (!run.ok()) return Answer(context, record, run.status());
  auto* reactor = context->DefaultReactor();
  (*run)->Rewind(ToRewindOrder(*request), [reactor, response, record](const absl::StatusOr<Rewound>& rewound) mutable {
    if (rewound.ok()) {
      response->set_step(rewound->step);
      response->set_generation(rewound->generation);
    }
    record.Done(rewound.status().code());
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
  RpcRecord record(options_.environment.metrics, "Plan");
  const auto spec = ToRunSpec(request->spec(), options_.limits);
  if (spec.ok()) *response->mutable_plan() = PlanNow(*spec);
  return Answer(context, record, spec.status());
}

grpc::ServerUnaryReactor* AdminService::GetHistory(grpc::CallbackServerContext* context,
                                                   const v1::GetHistoryRequest* request,
                                                   v1::GetHistoryResponse* response) {
  RpcRecord record(options_.environment.metrics, "GetHistory");
  const auto run = options_.environment.runs->Find(request->run_id());
  const size_t most = request->most_steps() == 0 ? RunHistory::kSteps : request->most_steps();
  if (run.ok()) *response = FromHistory(**run, request->after_step(), most);
  return Answer(context, record, run.status());
}

}  // namespace ballast
