// One Pull call: writes what the run encodes, a chunk at a time, or, if the reader takes batches, several small ones.
//
// Its life and its end: stream_call.h.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "server/rpc/stream_call.h"
#include "server/store/weight_sink.h"

namespace ballast {

class PullStream final : public StreamCall<grpc::ServerWriteReactor<v1::Weights>>,
                         public WeightSink,
                         public std::enable_shared_from_this<PullStream> {
 public:
  static PullStream* Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                           const v1::PullRequest& request);

  Written WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) override;
  void TakeBack(WeightPiece* piece) override;
  bool gathers() const override { return gathers_; }
  void Flush() override;
  void Finish(absl::Status status) override { End(status); }
  void Cancel() override { TryCancel(); }

  void OnWriteDone(bool ok) override;

 private:
  friend StreamCall<grpc::ServerWriteReactor<v1::Weights>>;  // StartOf
  using Reactor = grpc::ServerWriteReactor<v1::Weights>;

  PullStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context);
  absl::Status Begin(const grpc::CallbackServerContext& context, const v1::PullRequest& request);
  void TellGrpc(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override;
  void OnGone() override;

  const RpcEnvironment environment_;
  std::shared_ptr<Run> run_;
  bool gathers_ = false;
  v1::Weights weights_;  // the message in hand: a batch, where the reader takes them
  int taken_back_ = 0;   // of the batch
};

}  // namespace ballast
