// A daemon whose runs may have versions with names, in memory or on the disk.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "ballast/v1/follow.grpc.pb.h"
#include "tests/server/rpc/rpc_fixture.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast::testing {

class TagFixture : public RpcTest {
 protected:
  void SetUp() override { Start(DefaultConfig()); }
  void Start(const Config& config) {
    server_.reset();
    StartServer(config);
    follow_ = v1::FollowService::NewStub(channel_);
  }
  void StartWithStorage() {
    Config config = DefaultConfig();
    config.storage.dir = folder_.path();
    Start(config);
  }
  // Where it was, after a checkpoint.
  void StartAnew(Trainer* trainer) {
    v1::CheckpointRequest request;
    request.set_run_id("r1");
    grpc::ClientContext context;
    v1::CheckpointResponse response;
    ASSERT_TRUE(admin_->Checkpoint(&context, request, &response).ok());
    trainer->wire.reset();
    StartWithStorage();
  }
  static v1::RunSpec Tagged(const std::string& serving = "", uint32_t tags = 3) {
    v1::RunSpec spec = SmallSpec();
    spec.mutable_follow()->set_tags(tags);
    if (!serving.empty()) spec.mutable_groups(0)->set_serving(serving);
    return spec;
  }
  v1::ListVersionsResponse Versions() {
    v1::ListVersionsRequest request;
    request.set_run_id("r1");
    v1::ListVersionsResponse answer;
    grpc::ClientContext context;
    const grpc::Status s = follow_->ListVersions(&context, request, &answer);
    EXPECT_TRUE(s.ok()) << s.error_message();
    return answer;
  }
  std::string Refused(const grpc::Status& status, grpc::StatusCode code) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    return status.error_message();
  }

  TemporaryFolder folder_;
  std::unique_ptr<v1::FollowService::Stub> follow_;
};

}  // namespace ballast::testing
