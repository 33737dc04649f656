#include "server/rpc/admin_service.h"

#include <utility>

#include "proto/known_fields.h"

#include "server/convert/convert.h"
#include "server/rpc/admission.h"

namespace ballast {

grpc::ServerUnaryReactor* AdminService::GetServer(grpc::CallbackServerContext* context, const v1::GetServerRequest*,
                                                  v1::GetServerResponse* response) {
  PendingCall call = Admit(environment_, context, "GetServer", "");
  if (!call.admitted) return call.reactor;
  *response = status_->GetServer();
  call.Finish(absl::OkStatus());
  return call.reactor;
}

grpc::ServerUnaryReactor* AdminService::ListRuns(grpc::CallbackServerContext* context, const v1::ListRunsRequest*,
                                                 v1::ListRunsResponse* response) {
  PendingCall call = Admit(environment_, context, "ListRuns", "");
  if (!call.admitted) return call.reactor;
  v1::ListRunsResponse all = status_->ListRuns();
  for (v1::RunStatus& run : *all.mutable_runs()) {
    if (MaySee(environment_, call.caller, run.run_id())) response->add_runs()->Swap(&run);
  }
  call.Finish(absl::OkStatus());
  return call.reactor;
}

grpc::ServerUnaryReactor* AdminService::GetRun(grpc::CallbackServerContext* context, const v1::GetRunRequest* request,
                                               v1::GetRunResponse* response) {
  return AnswerInTurn(environment_, context, "GetRun", request->run_id(), *request,
                      [=, this](PendingCall call, const auto&) {
                        auto run = status_->GetRun(request->run_id());
                        if (run.ok()) *response = *std::move(run);
                        call.Finish(run.status());
                      });
}

grpc::ServerUnaryReactor* AdminService::DeleteRun(grpc::CallbackServerContext* context,
                                                  const v1::DeleteRunRequest* request,
                                                  v1::DeleteRunResponse* response) {
  PendingCall call = AdmitChange(environment_, context, "DeleteRun", request->run_id(), *request);
  if (!call.admitted) return call.reactor;
  const RunRegistry::DeleteMode mode{
      .force = request->force(), .keep_checkpoints = request->keep_checkpoints(), .daemons = request->daemons()};
  environment_.runs->Delete(request->run_id(), mode, [call, response](const absl::StatusOr<uint64_t>& freed) mutable {
    if (freed.ok()) response->set_freed_bytes(*freed);
    call.Finish(freed.status());
  });
  return call.reactor;
}

grpc::ServerUnaryReactor* AdminService::Rewind(grpc::CallbackServerContext* context, const v1::RewindRequest* request,
                                               v1::RewindResponse* response) {
  PendingCall call = AdmitChange(environment_, context, "Rewind", request->run_id(), *request);
  if (!call.admitted) return call.reactor;
  const auto run = environment_.runs->Find(request->run_id());
  if (!run.ok()) {
    call.Finish(run.status());
    return call.reactor;
  }
  (*run)->Rewind(ToRewindOrder(*request), [call, response](const absl::StatusOr<Rewound>& rewound) mutable {
    if (rewound.ok()) {
      response->set_step(rewound->step);
      response->set_generation(rewound->generation);
    }
    call.Finish(rewound.status());
  });
  return call.reactor;
}

grpc::ServerUnaryReactor* AdminService::Checkpoint(grpc::CallbackServerContext* context,
                                                   const v1::CheckpointRequest* request,
                                                   v1::CheckpointResponse* response) {
  PendingCall call = AdmitChange(environment_, context, "Checkpoint", request->run_id(), *request);
  if (!call.admitted) return call.reactor;
  environment_.runs->Checkpoint(request->run_id(), [call, response](const auto& checkpointed) mutable {
    if (checkpointed.ok()) *response = FromCheckpointed(*checkpointed);
    call.Finish(checkpointed.status());
  });
  return call.reactor;
}

grpc::ServerUnaryReactor* AdminService::ListCheckpoints(grpc::CallbackServerContext* context,
                                                        const v1::ListCheckpointsRequest* request,
                                                        v1::ListCheckpointsResponse* response) {
  // Manifests are read: other requests do not wait for the disk.
  RpcEnvironment of_disk = environment_;
  of_disk.requests = environment_.disk_requests;
  return AnswerInTurn(of_disk, context, "ListCheckpoints", request->run_id(), *request,
                      [=, this](PendingCall call, const auto&) {
                        const auto stored = environment_.runs->Checkpoints(request->run_id());
                        if (stored.ok()) *response = FromStored(*stored);
                        call.Finish(stored.status());
                      });
}

grpc::ServerUnaryReactor* AdminService::Restore(grpc::CallbackServerContext* context, const v1::RestoreRequest* request,
                                                v1::RestoreResponse* response) {
  const auto answer = [response](PendingCall call, const absl::StatusOr<Rewound>& restored) {
    if (restored.ok()) {
      response->set_step(restored->step);
      response->set_generation(restored->generation);
    }
    call.Finish(restored.status());
  };
  if (request->from().empty()) {
    PendingCall call = AdmitChange(environment_, context, "Restore", request->run_id(), *request);
    if (!call.admitted) return call.reactor;
    environment_.runs->Restore(request->run_id(), request->step(), call.payer,
                               [call, answer](const auto& restored) { answer(call, restored); });
    return call.reactor;
  }
  RpcEnvironment of_imports = environment_;
  of_imports.requests = environment_.imports;
  return AnswerInTurn(
      of_imports, context, "Restore", request->run_id(), *request,
      [=, this](PendingCall call, const RequestQueue::Place& place) {
        if (auto s = CheckKnownFields(*request); !s.ok()) return call.Finish(s);
        auto checkpoint = environment_.runs->Examine(request->run_id(), request->from(), request->step());
        if (!checkpoint.ok()) return call.Finish(checkpoint.status());
        environment_.runs->RestoreFrom(request->run_id(), *std::move(checkpoint), call.payer,
                                       [call, answer, place](const auto& restored) { answer(call, restored); });
      });
}

grpc::ServerUnaryReactor* AdminService::Plan(grpc::CallbackServerContext* context, const v1::PlanRequest* request,
                                             v1::PlanResponse* response) {
  return AnswerInTurn(environment_, context, "Plan", request->spec().run_id(), *request,
                      [=, this](PendingCall call, const auto&) {
                        const auto spec = ToRunSpec(request->spec(), limits_, environment_.runs->has_storage());
                        if (spec.ok()) *response->mutable_plan() = status_->PlanRun(*spec);
                        call.Finish(spec.status());
                      });
}

grpc::ServerUnaryReactor* AdminService::GetHistory(grpc::CallbackServerContext* context,
                                                   const v1::GetHistoryRequest* request,
                                                   v1::GetHistoryResponse* response) {
  return AnswerInTurn(environment_, context, "GetHistory", request->run_id(), *request,
                      [=, this](PendingCall call, const auto&) {
                        auto history = status_->GetHistory(*request);
                        if (history.ok()) *response = *std::move(history);
                        call.Finish(history.status());
                      });
}

}  // namespace ballast
