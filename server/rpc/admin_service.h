// The operator's calls. Thread-safe; no thread waits here for a step or for the disk, but the one of requests, which reads
// what checkpoints there are.
#pragma once

#include <grpcpp/grpcpp.h>

#include "ballast/v1/admin.grpc.pb.h"
#include "server/config/config.h"
#include "server/convert/daemon_status.h"
#include "server/rpc/rpc.h"

namespace ballast {

class AdminService final : public v1::AdminService::CallbackService {
 public:
  // `status` outlives it.
  AdminService(const RpcEnvironment& environment, const Config::Limits& limits, const DaemonStatus* status)
      : environment_(environment), limits_(limits), status_(status) {}

  grpc::ServerUnaryReactor* GetServer(grpc::CallbackServerContext* context, const v1::GetServerRequest* request,
                                      v1::GetServerResponse* response) override;
  grpc::ServerUnaryReactor* ListRuns(grpc::CallbackServerContext* context, const v1::ListRunsRequest* request,
                                     v1::ListRunsResponse* response) override;
  grpc::ServerUnaryReactor* GetRun(grpc::CallbackServerContext* context, const v1::GetRunRequest* request,
                                   v1::GetRunResponse* response) override;
  grpc::ServerUnaryReactor* DeleteRun(grpc::CallbackServerContext* context, const v1::DeleteRunRequest* request,
                                      v1::DeleteRunResponse* response) override;
  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context, const v1::PlanRequest* request,
                                 v1::PlanResponse* response) override;
  grpc::ServerUnaryReactor* Rewind(grpc::CallbackServerContext* context, const v1::RewindRequest* request,
                                   v1::RewindResponse* response) override;
  grpc::ServerUnaryReactor* GetHistory(grpc::CallbackServerContext* context, const v1::GetHistoryRequest* request,
                                       v1::GetHistoryResponse* response) override;
  grpc::ServerUnaryReactor* Checkpoint(grpc::CallbackServerContext* context, const v1::CheckpointRequest* request,
                                       v1::CheckpointResponse* response) override;
  grpc::ServerUnaryReactor* ListCheckpoints(grpc::CallbackServerContext* context,
                                            const v1::ListCheckpointsRequest* request,
                                            v1::ListCheckpointsResponse* response) override;
  grpc::ServerUnaryReactor* Restore(grpc::CallbackServerContext* context, const v1::RestoreRequest* request,
                                    v1::RestoreResponse* response) override;

 private:
  const RpcEnvironment environment_;
  const Config::Limits limits_;
  const DaemonStatus* const status_;
};

}  // namespace ballast
