// One LoadState call: reads a chunk, or a batch of small ones, has the run load it, and reads the next. It holds one
// message in memory at a time.
//
// Its life and its end: stream_call.h. The callbacks of its run that are under way hold it, too.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/base/thread_annotations.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "server/rpc/stream_call.h"

namespace ballast {

class LoadStream final : public StreamCall<grpc::ServerReadReactor<v1::LoadStateRequest>>,
                         public std::enable_shared_from_this<LoadStream> {
 public:
  // caller: as Enter says. `context` may be nullptr.
  static LoadStream* Start(const RpcEnvironment& environment, v1::LoadStateResponse* response, const std::string& peer,
                           absl::StatusOr<Caller> caller = Caller(), grpc::CallbackServerContext* context = nullptr);

  void OnReadDone(bool ok) override;

 private:
  LoadStream(const RpcEnvironment& environment, v1::LoadStateResponse* response, const std::string& peer,
             grpc::CallbackServerContext* context);
  // Whether the client is gone, rather than done.
  bool IsCut();
  absl::Status Bind();
  void LoadRequest();
  void FinishLoad();
  void ReadOn();
  void TellGrpc(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override;

  const RpcEnvironment environment_;
  Caller caller_;
  v1::LoadStateRequest request_;
  std::shared_ptr<Run> run_;  // from the first message on
  LoadCall call_;

  v1::LoadStateResponse* const response_;  // gRPC's, until finished
  bool begun_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ballast
