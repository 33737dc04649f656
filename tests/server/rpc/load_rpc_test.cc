#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "proto/checksum.h"

#include "server/convert/convert.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class LoadRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    StartServer();
    ASSERT_TRUE(CreateRun(SmallSpec()).ok());
    spec_ = ToRunSpec(SmallSpec(), config_.limits).value();
    token_ = AttachFresh("r1").session_token();
    request_.set_session_token(token_);
    request_.set_tensor(2);
    request_.set_format("fp32");
    SetData({1, 2, 3, 4, 5});
  }
  void SetData(const std::vector<float>& values) {
    request_.set_data(values.data(), values.size() * 4);
    request_.set_crc32c(Crc32c(Bytes(request_.data())));
  }
  // Sends the one request and ends.
  grpc::Status Upload() {
    grpc::ClientContext context;
    const auto writer = trainer_->LoadState(&context, &response_);
    writer->Write(request_);
    writer->WritesDone();
    return writer->Finish();
  }

  RunSpec spec_;
  std::string token_;
  v1::LoadStateRequest request_;
  v1::LoadStateResponse response_;
};

TEST_F(LoadRpcTest, AnswersWithTheDigestsOfWhatIsServed) {
  ASSERT_TRUE(LoadAll(spec_, token_, &response_).ok());
  Reference reference(spec_);
  ASSERT_EQ(response_.digests_size(), 3);
  for (uint32_t i = 0; i < 3; ++i) {
    reference.Load(i, Weights(spec_, i));
    EXPECT_EQ(response_.digests(static_cast<int>(i)), reference.Digest(i)) << i;
  }
  // Again, as long as no step has begun.
  EXPECT_TRUE(LoadAll(spec_, token_, &response_).ok());
}

TEST_F(LoadRpcTest, AnIncompleteTensorIsNamed) {
  const grpc::Status s = Upload();
  EXPECT_EQ(s.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(s.error_message(), HasSubstr("'embed.weight': 0 of 8 chunks"));
}

TEST_F(LoadRpcTest, NanAndInfinityAreRefusedByTensor) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    SetData({1, 2, bad, 4, 5});
    const grpc::Status s = Upload();
    EXPECT_EQ(s.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(s.error_message(), HasSubstr("'layers.0.b' holds a NaN"));
  }
}

TEST_F(LoadRpcTest, WrongMessagesAreRefusedByName) {
  const v1::LoadStateRequest right = request_;
  request_.set_tensor(3);
  EXPECT_THAT(Upload().error_message(), HasSubstr("tensor 3: the run has 3 tensors"));
  request_ = right;
  request_.set_chunk(1);
  EXPECT_THAT(Upload().error_message(), HasSubstr("it has 1 chunks"));
  request_ = right;
  request_.set_format("int8");
  EXPECT_THAT(Upload().error_message(), HasSubstr("valid: fp32, bf16, fp16"));
  request_ = right;
  request_.set_slot("m");
  EXPECT_THAT(Upload().error_message(), HasSubstr("the slot is 'm'"));
  request_ = right;
  SetData({1, 2, 3});
  EXPECT_THAT(Upload().error_message(), HasSubstr("has 12 bytes; wanted: 20"));
  request_ = right;
  request_.set_crc32c(0);
  EXPECT_EQ(Upload().error_code(), grpc::DATA_LOSS);
  request_ = right;
  request_.set_session_token("0123456789abcdef");
  EXPECT_EQ(Upload().error_code(), grpc::NOT_FOUND);
}

TEST_F(LoadRpcTest, TrainingBeforeWeightsIsRefused) {
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(token_));
  wire.Begin(1);
  const grpc::Status s = wire.Finish();
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("LoadState"));
}

TEST_F(LoadRpcTest, LoadingAfterTheFirstStepIsRefused) {
  v1::RunSpec spec = SmallSpec();
  spec.set_run_id("r2");
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  const grpc::Status s = LoadAll(t.spec, t.token, &response_);
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("before the first step"));
}

TEST_F(LoadRpcTest, AFencedSessionCannotLoad) {
  AttachFresh("r1", /*takeover=*/true);
  EXPECT_EQ(Upload().error_code(), grpc::ABORTED);
}

// A client may lose its connection and come back before the daemon notices.
TEST_F(LoadRpcTest, AnUploadTakesThePlaceOfItsSessionsLastOne) {
  ASSERT_TRUE(LoadAll(spec_, token_, &response_).ok());
  grpc::ClientContext context;
  v1::LoadStateResponse left;
  const auto writer = trainer_->LoadState(&context, &left);
  writer->Write(request_);
  while (Resume("r1", token_).weights_loaded()) continue;  // until it has begun
  ASSERT_TRUE(LoadAll(spec_, token_, &response_).ok());
  writer->WritesDone();
  EXPECT_EQ(writer->Finish().error_code(), grpc::ABORTED);
  EXPECT_TRUE(Resume("r1", token_).weights_loaded());
}

TEST_F(LoadRpcTest, AResumedSessionHearsWhetherTheWeightsAreItsOwn) {
  EXPECT_FALSE(Resume("r1", token_).loaded_here());
  ASSERT_TRUE(LoadAll(spec_, token_, &response_).ok());
  EXPECT_TRUE(Resume("r1", token_).loaded_here());
  EXPECT_FALSE(Upload().ok());
  EXPECT_FALSE(Resume("r1", token_).loaded_here());
  ASSERT_TRUE(LoadAll(spec_, token_, &response_).ok());
  const auto next = AttachFresh("r1", /*takeover=*/true);
  EXPECT_TRUE(next.weights_loaded());
  EXPECT_FALSE(next.loaded_here());
}

TEST_F(LoadRpcTest, AnUploadThatFailsHalfwayLeavesTheRunWithoutWeights) {
  ASSERT_TRUE(LoadAll(spec_, token_, &response_).ok());
  EXPECT_FALSE(Upload().ok());
  EXPECT_FALSE(Resume("r1", token_).weights_loaded());
  ASSERT_TRUE(LoadAll(spec_, token_, &response_).ok());
  EXPECT_TRUE(Resume("r1", token_).weights_loaded());
}

}  // namespace
}  // namespace ballast::testing
