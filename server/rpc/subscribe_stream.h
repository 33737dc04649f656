// One Subscribe call: sends the versions that the run makes, a message at a time, in which small parts go together.
//
// Its life and its end: stream_call.h.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"

#include "ballast/v1/follow.grpc.pb.h"
#include "server/follow/version_sink.h"
#include "server/follow/version_source.h"
#include "server/rpc/stream_call.h"

namespace ballast {

class SubscribeStream final : public StreamCall<grpc::ServerWriteReactor<v1::VersionPart>>,
                              public VersionSink,
                              public std::enable_shared_from_this<SubscribeStream> {
 public:
  static SubscribeStream* Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                                const v1::SubscribeRequest& request);

  void Write(const VersionOpening& opening) override;
  void Write(const VersionChunk& chunk) override;
  void Write(const VersionClosing& closing) override;
  bool HasRoom(uint64_t bytes) const override;
  void OnTaken() override { reader_ = environment_.connections->CountReader(record_.peer()); }
  bool Send() override;
  void Finish(absl::Status status) override { End(status); }
  void Cancel() override { TryCancel(); }

  void OnWriteDone(bool ok) override;

 private:
  friend StreamCall<grpc::ServerWriteReactor<v1::VersionPart>>;  // StartOf
  using Reactor = grpc::ServerWriteReactor<v1::VersionPart>;

  SubscribeStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context);
  absl::Status Begin(const grpc::CallbackServerContext& context, const v1::SubscribeRequest& request);
  absl::Status FindRun(const std::string& run_id);
  void TellGrpc(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override;
  void OnGone() override;

  const RpcEnvironment environment_;
  std::shared_ptr<VersionSource> run_;
  std::shared_ptr<void> reader_;  // its place among the calls that may be open
  v1::VersionPart message_;       // gathered, or under way: the strand's until Send, gRPC's until OnWriteDone
  size_t bytes_ = 0;              // of its chunks
  bool large_ = false;            // one of them goes alone
};

}  // namespace ballast
