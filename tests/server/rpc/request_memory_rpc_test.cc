// Messages of few bytes that would take much of the daemon's memory: of fields that it does not know, which are kept.
#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include "ballast/v1/follow.grpc.pb.h"
#include "server/rpc/request_memory.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

// Each has three bytes on the wire.
template <class Message>
Message WithEmptyFields(Message message, int count) {
  auto* const unknown = message.GetReflection()->MutableUnknownFields(&message);
  for (int i = 0; i < count; ++i) unknown->AddLengthDelimited(1999, "");
  return message;
}

void ExpectTooMuch(const grpc::Status& status, const std::string& message) {
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("the " + message + " takes "));
  EXPECT_THAT(status.error_message(), HasSubstr("bytes of the daemon's memory; wanted: at most "));
}

class RequestMemoryRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    StartServer();
    v1::RunSpec spec = SmallSpec();
    spec.mutable_follow()->set_readers(1);
    trainer = StartTrainer(spec);
  }
  v1::PullRequest PullOfR1() {
    v1::PullRequest request;
    request.set_run_id("r1");
    return request;
  }
  grpc::Status Pull(const v1::PullRequest& request) {
    grpc::ClientContext context;
    return trainer_->Pull(&context, request)->Finish();
  }
  Trainer trainer;
};

TEST_F(RequestMemoryRpcTest, ACallThatIsKeptUntilItEndsIsRefusedAndTheRunGoesOn) {
  constexpr int kMany = 100'000;
  ExpectTooMuch(Pull(WithEmptyFields(PullOfR1(), kMany)), "PullRequest");
  v1::PullRequest of_version = PullOfR1();
  of_version.mutable_version()->set_tag("best");
  ExpectTooMuch(Pull(WithEmptyFields(of_version, kMany)), "PullRequest");
  v1::SubscribeRequest subscribe;
  subscribe.set_run_id("r1");
  grpc::ClientContext context;
  const auto follow = v1::FollowService::NewStub(channel_);
  ExpectTooMuch(follow->Subscribe(&context, WithEmptyFields(subscribe, kMany))->Finish(), "SubscribeRequest");
  v1::AttachRequest attach;
  attach.set_run_id("r1");
  attach.set_world(1);
  attach.set_protocol_min(1);
  attach.set_protocol_max(1);
  v1::AttachResponse attached;
  ExpectTooMuch(Attach(WithEmptyFields(attach, kMany), &attached), "AttachRequest");
  ExpectSteps(&trainer, 1, 2);
}

TEST_F(RequestMemoryRpcTest, AFewFieldsOfALaterClientAreTaken) {
  grpc::ClientContext context;
  const auto reader = trainer_->Pull(&context, WithEmptyFields(PullOfR1(), 100));
  v1::Weights weights;
  while (reader->Read(&weights)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(RequestMemoryRpcTest, AStreamsFirstMessageIsAsBoundedAsTheOthers) {
  const std::string token = AttachFresh("r1", /*takeover=*/true).session_token();
  const int many = static_cast<int>(DefaultConfig().limits.message_bytes / 3);
  v1::TrainRequest open;
  open.mutable_open()->set_session_token(token);
  Wire wire(trainer_.get());
  wire.Send(WithEmptyFields(open, many));
  const grpc::Status train = wire.Finish();
  EXPECT_EQ(train.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(train.error_message(), HasSubstr("is larger than the daemon's limits.message_bytes"));
  v1::LoadStateRequest load;
  load.set_session_token(token);
  grpc::ClientContext context;
  v1::LoadStateResponse response;
  const auto upload = trainer_->LoadState(&context, &response);
  upload->Write(WithEmptyFields(load, many));
  EXPECT_THAT(upload->Finish().error_message(), HasSubstr("is larger than the daemon's limits.message_bytes"));
}

TEST(RequestMemoryTest, WhatIsLargeIsNotKeptAndWhatIsSmallIs) {
  v1::TrainRequest small = WithEmptyFields(v1::TrainRequest(), 10),
                   large = WithEmptyFields(v1::TrainRequest(), 100'000);
  const v1::TrainRequest* const kept = &small;
  LetGoOfLarge(small.ByteSizeLong(), &small);
  EXPECT_EQ(kept->GetReflection()->GetUnknownFields(*kept).field_count(), 10);
  LetGoOfLarge(large.ByteSizeLong(), &large);
  EXPECT_LT(large.SpaceUsedLong(), kMostKeptBytes);
}

TEST(RequestMemoryTest, ACallAboutEachTensorOfALargeRunIsTaken) {
  constexpr uint32_t kMany = 100'000;
  v1::AttachRequest attach;
  for (uint32_t i = 0; i < kMany; ++i) {
    v1::TensorCoverage* const one = attach.add_coverage();
    one->set_tensor(i);
    for (auto* ranges : {one->mutable_contributes(), one->mutable_receives()}) {
      for (uint64_t at = 0; at < 2; ++at) {
        ranges->Add()->set_begin(2 * at);
        ranges->rbegin()->set_end(2 * at + 1);
      }
    }
  }
  EXPECT_TRUE(CheckRequestMemory(attach, kMany, 2 * kMany).ok());
}

}  // namespace
}  // namespace ballast::testing
