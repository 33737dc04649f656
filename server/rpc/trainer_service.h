// The trainer's calls. Thread-safe; nothing here waits: what takes time answers from a strand.
#pragma once

#include <grpcpp/grpcpp.h>

#include "ballast/v1/trainer.grpc.pb.h"
#include "server/config/config.h"
#include "server/rpc/rpc.h"

namespace ballast {

class TrainerService final : public v1::TrainerService::CallbackService {
 public:
  TrainerService(const RpcEnvironment& environment, const Config::Limits& limits)
      : environment_(environment), limits_(limits) {}

  grpc::ServerUnaryReactor* CreateRun(grpc::CallbackServerContext* context, const v1::CreateRunRequest* request,
                                      v1::CreateRunResponse* response) override;
  grpc::ServerUnaryReactor* AmendRun(grpc::CallbackServerContext* context, const v1::AmendRunRequest* request,
                                     v1::AmendRunResponse* response) override;
  grpc::ServerUnaryReactor* Attach(grpc::CallbackServerContext* context, const v1::AttachRequest* request,
                                   v1::AttachResponse* response) override;
  grpc::ServerReadReactor<v1::LoadStateRequest>* LoadState(grpc::CallbackServerContext* context,
                                                           v1::LoadStateResponse* response) override;
  grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>* Train(grpc::CallbackServerContext* context) override;
  grpc::ServerWriteReactor<v1::Weights>* Pull(grpc::CallbackServerContext* context,
                                              const v1::PullRequest* request) override;

 private:
  // These two run on the thread of the queue that `place` is in.
  void Create(const v1::RunSpec& spec, PendingCall call, RequestQueue::Place place, v1::CreateRunResponse* response);
  struct PendingAmend {
    grpc::CallbackServerContext* context;
    PendingCall call;
    RequestQueue::Place place;
    v1::AmendRunResponse* response;
  };
  void Amend(const v1::AmendRunRequest& request, PendingAmend pending);
  grpc::ServerUnaryReactor* KeepAlive(const v1::AttachRequest& request, PendingCall call);
  absl::StatusOr<std::shared_ptr<Run>> CheckAttach(const v1::AttachRequest& request, Run::AttachRequest* made);

  const RpcEnvironment environment_;
  const Config::Limits limits_;
};

}  // namespace ballast
