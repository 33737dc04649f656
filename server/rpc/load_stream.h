// One LoadState call: reads a chunk, or a batch of small ones, has the run load it, and reads the next. It holds one
// message in memory at a time.
//
// gRPC (until OnDone) and the run's callbacks under way share the object. Every path calls Finish exactly once.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "server/rpc/rpc.h"

namespace ballast {

class LoadStream final : public grpc::ServerReadReactor<v1::LoadStateRequest>,
                         public std::enable_shared_from_this<LoadStream> {
 public:
  static LoadStream* Start(const RpcEnvironment& environment, v1::LoadStateResponse* response, const std::string& peer);

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  using Reactor = grpc::ServerReadReactor<v1::LoadStateRequest>;

  LoadStream(const RpcEnvironment& environment, v1::LoadStateResponse* response, const std::string& peer);
  absl::Status Bind();
  void LoadRequest();
  void FinishLoad();
  void ReadOn();
  void End(const absl::Status& status);

  const RpcEnvironment environment_;
  RpcRecord record_;
  std::shared_ptr<LoadStream> self_;  // until OnDone
  v1::LoadStateRequest request_;
  std::shared_ptr<Run> run_;  // from the first message on
  LoadCall call_;

  absl::Mutex mu_;
  v1::LoadStateResponse* const response_;  // gRPC's, until finished
  bool begun_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status ended_with_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
