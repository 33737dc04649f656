// What a client of a later version asks for with a field that this daemon does not know is refused by that field, where
// passing over it would make another run, or do another thing to one.
#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <functional>

#include "ballast/v1/follow.grpc.pb.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kLaterField = 1999;

void AddLater(google::protobuf::Message* message) {
  message->GetReflection()->MutableUnknownFields(message)->AddVarint(kLaterField, 1);
}

void ExpectRefused(const grpc::Status& status, const std::string& field) {
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("does not know the field " + field));
  EXPECT_THAT(status.error_message(), HasSubstr("the client is of a later version"));
}

class LaterClientRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    StartServer();
    follow_ = v1::FollowService::NewStub(channel_);
  }

  // A call with a request that has such a field.
  template <typename Request, typename Response>
  void ExpectCallRefused(Request request,
                         const std::function<grpc::Status(grpc::ClientContext*, const Request&, Response*)>& call) {
    grpc::ClientContext context;
    Response response;
    request.set_run_id("r1");
    AddLater(&request);
    ExpectRefused(call(&context, request, &response), std::to_string(kLaterField));
  }

  std::unique_ptr<v1::FollowService::Stub> follow_;
};

TEST_F(LaterClientRpcTest, ASpecIsRefusedAndNoRunIsMade) {
  v1::RunSpec spec = SmallSpec();
  AddLater(&spec);
  grpc::ClientContext create_context, plan_context;
  v1::CreateRunRequest create;
  *create.mutable_spec() = spec;
  v1::CreateRunResponse created;
  ExpectRefused(trainer_->CreateRun(&create_context, create, &created), "1999 of RunSpec");
  spec = SmallSpec();
  AddLater(spec.mutable_tensors(1));
  v1::PlanRequest plan;
  *plan.mutable_spec() = spec;
  v1::PlanResponse planned;
  ExpectRefused(admin_->Plan(&plan_context, plan, &planned), "tensors[1].1999 of RunSpec");
  grpc::ClientContext list_context;
  v1::ListRunsResponse runs;
  ASSERT_TRUE(admin_->ListRuns(&list_context, {}, &runs).ok());
  EXPECT_EQ(runs.runs_size(), 0);
}

TEST_F(LaterClientRpcTest, AnAmendmentIsRefusedAndTheRunGoesOn) {
  Trainer trainer = StartTrainer(SmallSpec());
  v1::RunSpec later = SmallSpec();
  AddLater(later.mutable_rewind());
  ExpectRefused(Amend(trainer.token, later), "rewind.1999 of RunSpec");
  ExpectSteps(&trainer, 1, 2);
}

TEST_F(LaterClientRpcTest, WhatIsAskedOfARunIsRefusedAndTheRunGoesOn) {
  Trainer trainer = StartTrainer(SmallSpec());
  ExpectSteps(&trainer, 1, 2);
  v1::DeleteRunRequest all;
  all.set_force(true);
  ExpectCallRefused<v1::DeleteRunRequest, v1::DeleteRunResponse>(
      all, [&](auto* context, const auto& request, auto* response) {
        return admin_->DeleteRun(context, request, response);
      });
  ExpectCallRefused<v1::RewindRequest, v1::RewindResponse>({}, [&](auto* context, const auto& request, auto* response) {
    return admin_->Rewind(context, request, response);
  });
  ExpectCallRefused<v1::CheckpointRequest, v1::CheckpointResponse>(
      {}, [&](auto* context, const auto& request, auto* response) {
        return admin_->Checkpoint(context, request, response);
      });
  v1::RestoreRequest from;
  for (const char* folder : {"", "/elsewhere"}) {
    from.set_from(folder);
    ExpectCallRefused<v1::RestoreRequest, v1::RestoreResponse>(from,
                                                               [&](auto* context, const auto& request, auto* response) {
                                                                 return admin_->Restore(context, request, response);
                                                               });
  }
  ExpectCallRefused<v1::TagVersionRequest, v1::TagVersionResponse>(
      {}, [&](auto* context, const auto& request, auto* response) {
        return follow_->TagVersion(context, request, response);
      });
  ExpectCallRefused<v1::UntagVersionRequest, v1::UntagVersionResponse>(
      {}, [&](auto* context, const auto& request, auto* response) {
        return follow_->UntagVersion(context, request, response);
      });
  ExpectSteps(&trainer, 3, 4);
}

TEST_F(LaterClientRpcTest, WhatAClientAnnouncesAndAsksIsAnswered) {
  CreateRun(SmallSpec()).value();
  v1::AttachRequest attach;
  attach.set_run_id("r1");
  attach.set_world(1);
  attach.set_protocol_min(1);
  attach.set_protocol_max(1);
  AddLater(&attach);
  v1::AttachResponse attached;
  EXPECT_TRUE(Attach(attach, &attached).ok());
  grpc::ClientContext context;
  v1::GetServerRequest request;
  AddLater(&request);
  v1::GetServerResponse server;
  EXPECT_TRUE(admin_->GetServer(&context, request, &server).ok());
}

}  // namespace
}  // namespace ballast::testing
