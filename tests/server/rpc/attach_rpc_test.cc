#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

class AttachRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    StartServer();
    ASSERT_TRUE(CreateRun(SmallSpec()).ok());
    request_.set_run_id("r1");
  }
  grpc::Status Ask() { return Attach(request_, &response_); }

  v1::AttachRequest request_;
  v1::AttachResponse response_;
};

TEST_F(AttachRpcTest, TellsAllATrainerNeeds) {
  ASSERT_TRUE(Ask().ok());
  EXPECT_EQ(response_.session_token().size(), 16u);
  EXPECT_EQ(response_.generation(), 1u);
  EXPECT_EQ(response_.resume_step(), 1u);
  EXPECT_EQ(response_.chunk_elements(), 4096u);
  EXPECT_EQ(response_.credit_bytes(), 4u << 20);
  EXPECT_EQ(response_.protocol(), 1u);
  EXPECT_EQ(response_.lease_s(), 10);
  EXPECT_FALSE(response_.weights_loaded());
  EXPECT_FALSE(response_.has_last_result());
  EXPECT_EQ(response_.digests_size(), 0);
}

TEST_F(AttachRpcTest, RefusesByName) {
  request_.set_world(2);
  EXPECT_THAT(Ask().error_message(), HasSubstr("world is 2; the run was created for 1 to 1 ranks"));
  request_.set_world(1);
  request_.set_rank(3);
  EXPECT_THAT(Ask().error_message(), HasSubstr("rank is 3"));
  request_.set_rank(0);
  request_.set_protocol_min(2);
  request_.set_protocol_max(4);
  EXPECT_EQ(Ask().error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(Ask().error_message(), HasSubstr("2 to 4"));
  request_.set_protocol_min(1);
  EXPECT_TRUE(Ask().ok());
  request_.set_session_token("garbage");
  EXPECT_EQ(Ask().error_code(), grpc::NOT_FOUND);
  request_.clear_session_token();
  request_.set_run_id("other");
  EXPECT_EQ(Ask().error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(Ask().error_message(), HasSubstr("there are: r1"));
}

TEST_F(AttachRpcTest, ATokenOfAnotherRankIsRefusedByName) {
  v1::RunSpec spec = SmallSpec();
  spec.set_run_id("r2");
  spec.set_ranks(2);
  ASSERT_TRUE(CreateRun(spec).ok());
  request_.set_run_id("r2");
  request_.set_world(2);
  request_.set_session_token(AttachFresh("r2", false, /*rank=*/0, /*world=*/2).session_token());
  request_.set_rank(1);
  EXPECT_EQ(Ask().error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(Ask().error_message(), HasSubstr("the token is of rank 0, and the request says rank 1"));
  request_.set_rank(0);
  EXPECT_TRUE(Ask().ok());
}

TEST_F(AttachRpcTest, ASecondClientIsRefusedAndToldWhoHoldsTheRank) {
  const std::string token = AttachFresh("r1").session_token();
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(token));
  grpc::ClientContext context;
  const grpc::Status s = Attach(request_, &response_, &context);
  EXPECT_EQ(s.error_code(), grpc::ALREADY_EXISTS);
  EXPECT_THAT(s.error_message(), AnyOf(HasSubstr("127.0.0.1:"), HasSubstr("pid ")));
  EXPECT_THAT(s.error_message(), HasSubstr("takeover"));
  EXPECT_EQ(context.GetServerTrailingMetadata().count("ballast-retry-after-ms"), 0u);  // waiting does not help
}

TEST_F(AttachRpcTest, ALostClientHoldsTheRankForItsLeaseAndSaysHowLong) {
  AttachFresh("r1");  // and no stream: as good as lost
  grpc::ClientContext context;
  EXPECT_EQ(Attach(request_, &response_, &context).error_code(), grpc::ALREADY_EXISTS);
  const auto& trailing = context.GetServerTrailingMetadata();
  const auto retry = trailing.find("ballast-retry-after-ms");
  ASSERT_NE(retry, trailing.end());
  const int ms = std::stoi(std::string(retry->second.data(), retry->second.size()));
  EXPECT_GT(ms, 0);
  EXPECT_LE(ms, 10000);
}

TEST_F(AttachRpcTest, AShortLeaseRunsOut) {
  server_.reset();
  Config config = DefaultConfig();
  config.limits.lease_s = 0;
  StartServer(config);
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  AttachFresh("r1");
  EXPECT_TRUE(Ask().ok());
}

TEST_F(AttachRpcTest, TakeoverFencesTheHolder) {
  const std::string token = AttachFresh("r1").session_token();
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(token));
  const std::string other = AttachFresh("r1", /*takeover=*/true).session_token();
  EXPECT_NE(other, token);
  const grpc::Status s = wire.Finish();
  EXPECT_EQ(s.error_code(), grpc::ABORTED);
  EXPECT_THAT(s.error_message(), HasSubstr("took this rank over"));
  request_.set_session_token(token);
  EXPECT_EQ(Ask().error_code(), grpc::ABORTED);
  Wire again(trainer_.get());
  EXPECT_FALSE(again.Open(token));
  EXPECT_EQ(again.Finish().error_code(), grpc::ABORTED);
}

TEST_F(AttachRpcTest, ACleanGoodbyeGivesTheRankBackAtOnce) {
  const std::string token = AttachFresh("r1").session_token();
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(token));
  wire.CloseInput();
  EXPECT_TRUE(wire.Finish().ok());
  EXPECT_TRUE(Ask().ok());
}

TEST_F(AttachRpcTest, DigestsAreOfWhatIsServed) {
  v1::RunSpec spec = SmallSpec();
  spec.set_run_id("r2");
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  request_.set_run_id("r2");
  request_.set_takeover(true);
  request_.set_want_digests(true);
  ASSERT_TRUE(Ask().ok());
  EXPECT_TRUE(response_.weights_loaded());
  EXPECT_EQ(response_.resume_step(), 2u);
  EXPECT_EQ(response_.last_result().step(), 1u);
  ASSERT_EQ(response_.digests_size(), 3);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(response_.digests(static_cast<int>(i)), t.reference->Digest(i)) << i;
}

TEST_F(AttachRpcTest, RanksThatAttachAtOnceAllGetTheDigests) {
  v1::RunSpec spec = SmallSpec();
  spec.set_run_id("r2");
  spec.set_ranks(4);
  Trainer t = StartTrainer(spec);
  t.wire->CloseInput();
  EXPECT_TRUE(t.wire->Finish().ok());
  std::vector<v1::AttachResponse> responses(4);
  std::vector<grpc::Status> ended(4);
  std::vector<std::jthread> ranks;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      v1::AttachRequest request;
      request.set_run_id("r2");
      request.set_rank(rank);
      request.set_world(4);
      request.set_want_digests(true);
      ended[rank] = Attach(request, &responses[rank]);
    });
  }
  ranks.clear();
  for (uint32_t rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(ended[rank].ok()) << ended[rank].error_message();
    ASSERT_EQ(responses[rank].digests_size(), 3);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(responses[rank].digests(i), t.reference->Digest(static_cast<uint32_t>(i)));
  }
}

}  // namespace
}  // namespace ballast::testing
