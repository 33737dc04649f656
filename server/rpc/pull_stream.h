// One Pull call: writes what the run encodes, a chunk at a time.
//
// gRPC (until OnDone) and the run (until it lets go) share the object. Every path calls Finish exactly once.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "server/rpc/rpc.h"
#include "server/store/weight_sink.h"

namespace ballast {

class PullStream final : public grpc::ServerWriteReactor<v1::Weights>,
                         public WeightSink,
                         public std::enable_shared_from_this<PullStream> {
 public:
  static PullStream* Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                           const v1::PullRequest& request);

  bool WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) override;
  void TakeBack(WeightPiece* piece) override;
  void Finish(absl::Status status) override;
  void Cancel() override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  using Reactor = grpc::ServerWriteReactor<v1::Weights>;

  PullStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context);
  absl::Status Begin(const v1::PullRequest& request);

  RpcRecord record_;
  std::shared_ptr<PullStream> self_;  // until OnDone
  std::shared_ptr<Run> run_;
  v1::Weights weights_;

  absl::Mutex mu_;
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mu_);  // until OnDone
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status ended_with_ ABSL_GUARDED_BY(mu_);
  const RpcEnvironment environment_;
};

}  // namespace ballast
