// The calls of readers that follow a run, and of who names its versions. Thread-safe; nothing here waits.
#pragma once

#include <grpcpp/grpcpp.h>

#include "ballast/v1/follow.grpc.pb.h"
#include "server/rpc/rpc.h"
#include "server/rpc/subscribe_stream.h"

namespace ballast {

class FollowService final : public v1::FollowService::CallbackService {
 public:
  explicit FollowService(const RpcEnvironment& environment) : environment_(environment) {}

  grpc::ServerWriteReactor<v1::VersionPart>* Subscribe(grpc::CallbackServerContext* context,
                                                       const v1::SubscribeRequest* request) override {
    return SubscribeStream::Start(environment_, context, *request);
  }
  grpc::ServerUnaryReactor* TagVersion(grpc::CallbackServerContext* context, const v1::TagVersionRequest* request,
                                       v1::TagVersionResponse* response) override;
  grpc::ServerUnaryReactor* UntagVersion(grpc::CallbackServerContext* context, const v1::UntagVersionRequest* request,
                                         v1::UntagVersionResponse* response) override;
  grpc::ServerUnaryReactor* ListVersions(grpc::CallbackServerContext* context, const v1::ListVersionsRequest* request,
                                         v1::ListVersionsResponse* response) override;

 private:
  const RpcEnvironment environment_;
};

}  // namespace ballast
