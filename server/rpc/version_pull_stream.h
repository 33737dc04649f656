// One Pull call of a version that is kept: the chunks of it, or, if the reader takes batches, several small ones together.
//
// Its life and its end: stream_call.h.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <memory>

#include "absl/base/thread_annotations.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "server/follow/version_sink.h"
#include "server/rpc/stream_call.h"

namespace ballast {

class VersionPullStream final : public StreamCall<grpc::ServerWriteReactor<v1::Weights>>,
                                public VersionSink,
                                public std::enable_shared_from_this<VersionPullStream> {
 public:
  static VersionPullStream* Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                                  const v1::PullRequest& request);

  void Write(const VersionOpening& opening) override { step_ = opening.id.step; }
  void Write(const VersionChunk& chunk) override;
  void Write(const VersionClosing&) override {}
  bool HasRoom(uint64_t bytes) const override;
  void OnTaken() override { reader_ = environment_.connections->CountReader(record_.peer()); }
  bool Send() override;
  void Finish(absl::Status status) override { End(status); }
  void Cancel() override { TryCancel(); }

  void OnWriteDone(bool ok) override;

 private:
  friend StreamCall<grpc::ServerWriteReactor<v1::Weights>>;  // StartOf
  using Reactor = grpc::ServerWriteReactor<v1::Weights>;

  VersionPullStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context);
  absl::Status Begin(const grpc::CallbackServerContext& context, const v1::PullRequest& request);
  void TellGrpc(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override;
  void OnGone() override;

  const RpcEnvironment environment_;
  std::shared_ptr<Run> run_;
  std::shared_ptr<void> reader_;  // its place among the calls that may be open
  bool gathers_ = false;
  v1::Weights message_;  // gathered, or under way: the strand's until Send, gRPC's until OnWriteDone
  size_t bytes_ = 0;     // of its chunks
  bool large_ = false;   // one of them goes alone
  uint64_t step_ = 0;    // of the version
};

}  // namespace ballast
