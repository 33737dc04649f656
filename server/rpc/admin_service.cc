#include "server/rpc/admin_service.h"

#include <utility>

#include "server/convert/convert.h"

namespace ballast {

grpc::ServerUnaryReactor* AdminService::Answer(grpc::CallbackServerContext* context, RpcRecord record,
                                               const absl::Status& status) {
  auto* reactor = context->DefaultReactor();
  record.Done(status);
  reactor->Finish(ToGrpc(status));
  return reactor;
}

PendingCall AdminService::Pend(grpc::CallbackServerContext* context, const std::string& method,
                               const std::string& run_id) const {
  PendingCall call{context->DefaultReactor(), RpcRecord(environment_.metrics, method, context->peer())};
  call.record.set_run_id(run_id);
  return call;
}

grpc::ServerUnaryReactor* AdminService::GetServer(grpc::CallbackServerContext* context, const v1::GetServerRequest*,
                                                  v1::GetServerResponse* response) {
  RpcRecord record(environment_.metrics, "GetServer", context->peer());
  *response = status_->GetServer();
  return Answer(context, record, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::ListRuns(grpc::CallbackServerContext* context, const v1::ListRunsRequest*,
                                                 v1::ListRunsResponse* response) {
  RpcRecord record(environment_.metrics, "ListRuns", context->peer());
  *response = status_->ListRuns();
  return Answer(context, record, absl::OkStatus());
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
  PendingCall call = Pend(context, "DeleteRun", request->run_id());
  const RunRegistry::DeleteMode mode{.force = request->force(), .keep_checkpoints = request->keep_checkpoints()};
  environment_.runs->Delete(request->run_id(), mode, [call, response](const absl::StatusOr<uint64_t>& freed) mutable {
    if (freed.ok()) response->set_freed_bytes(*freed);
    call.Finish(freed.status());
  });
  return call.reactor;
}

grpc::ServerUnaryReactor* AdminService::Rewind(grpc::CallbackServerContext* context, const v1::RewindRequest* request,
                                               v1::RewindResponse* response) {
  RpcRecord record(environment_.metrics, "Rewind", context->peer());
  record.set_run_id(request->run_id());
  const auto run = environment_.runs->Find(request->run_id());
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

grpc::ServerUnaryReactor* AdminService::Checkpoint(grpc::CallbackServerContext* context,
                                                   const v1::CheckpointRequest* request,
                                                   v1::CheckpointResponse* response) {
  PendingCall call = Pend(context, "Checkpoint", request->run_id());
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
    PendingCall call = Pend(context, "Restore", request->run_id());
    environment_.runs->Restore(request->run_id(), request->step(),
                               [call, answer](const auto& restored) { answer(call, restored); });
    return call.reactor;
  }
  RpcEnvironment of_imports = environment_;
  of_imports.requests = environment_.imports;
  return AnswerInTurn(
      of_imports, context, "Restore", request->run_id(), *request,
      [=, this](PendingCall call, const RequestQueue::Place& place) {
        auto checkpoint = environment_.runs->Examine(request->run_id(), request->from(), request->step());
        if (!checkpoint.ok()) return call.Finish(checkpoint.status());
        environment_.runs->RestoreFrom(request->run_id(), *std::move(checkpoint),
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
