// Readers that follow a run in training: every version has the bits that Pull brings of its step, through rewinds,
// replaced weights and amended specs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/rpc/follow_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

TEST_F(FollowRpcTest, EveryVersionHasWhatPullBringsOfItsStep) {
  for (const char* serving : {"", "bf16", "int8-row"}) {
    SCOPED_TRACE(serving);
    Trainer t = StartTrainer(Followed(serving));
    Reader reader(follow_.get(), OfRun());
    ASSERT_TRUE(reader.AwaitStep(0));
    ExpectPulled(reader);
    for (uint64_t step = 1; step <= 5; ++step) {
      Step(&t, step, 1e-4);
      ASSERT_TRUE(reader.AwaitStep(step));
      ExpectPulled(reader);
    }
    Reader late(follow_.get(), OfRun());
    ASSERT_TRUE(late.AwaitStep(5));
    ExpectPulled(late);
    const v1::FollowStatus shown = Status("r1").follow();
    EXPECT_EQ(shown.newest().step(), 5u);
    EXPECT_EQ(shown.readers(), 2u);
    EXPECT_GT(shown.changed_ratio(), 0);
    v1::DeleteRunRequest request;
    request.set_run_id("r1");
    request.set_force(true);
    grpc::ClientContext context;
    v1::DeleteRunResponse response;
    ASSERT_TRUE(admin_->DeleteRun(&context, request, &response).ok());
    const grpc::Status gone = reader.Finish().status;
    EXPECT_EQ(gone.error_code(), grpc::NOT_FOUND);
    EXPECT_THAT(gone.error_message(), HasSubstr("run 'r1' was deleted"));
  }
}

TEST_F(FollowRpcTest, AnAverageIsFollowedAsTheWeightsAre) {
  for (const char* serving : {"", "int8-row"}) {
    SCOPED_TRACE(serving);
    v1::RunSpec spec = Followed(serving);
    for (const double decay : {0.5, 0.9}) spec.add_averages(decay);
    spec.mutable_follow()->set_averages(true);
    spec.mutable_follow()->set_readers(3);
    Trainer t = StartTrainer(spec);
    Reader weights(follow_.get(), OfRun()), one(follow_.get(), OfAverage(0.5)), other(follow_.get(), OfAverage(0.9));
    for (uint64_t step = 0; step <= 4; ++step) {
      if (step > 0) Step(&t, step, 1e-4);
      for (Reader* reader : {&weights, &one, &other}) ASSERT_TRUE(reader->AwaitStep(step));
      ExpectPulled(weights);
      ExpectPulled(one, 0.5);
      ExpectPulled(other, 0.9);
    }
    EXPECT_GT(one.changed_chunks + other.changed_chunks, 0u);
    EXPECT_EQ(Status("r1").follow().readers(), 3u);
    EXPECT_EQ(Refusal(OfAverage(0.9)).error_code(), grpc::RESOURCE_EXHAUSTED) << "of another series as well";
    EXPECT_THAT(Refusal(OfAverage(0.99)).error_message(), HasSubstr("it keeps 0.5, 0.9"));
    t.wire.reset();
    server_.reset();
    SetUp();
  }
}

TEST_F(FollowRpcTest, AnAverageIsFollowedWhereTheSpecSaysSo) {
  v1::RunSpec spec = Followed();
  spec.mutable_follow()->set_averages(true);
  EXPECT_THAT(std::string(CreateRun(spec).status().message()),
              HasSubstr("follow.averages is set, and the run keeps no"));
  spec.add_averages(0.9);
  spec.mutable_follow()->set_averages(false);
  Trainer t = StartTrainer(spec);
  const grpc::Status refused = Refusal(OfAverage(0.9));
  EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("readers may follow its weights alone"));
}

TEST_F(FollowRpcTest, ReadersGoBackWithTheRun) {
  v1::RunSpec spec = Followed("bf16");
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(2);
  Trainer t = StartTrainer(spec);
  Reader reader(follow_.get(), OfRun());
  for (uint64_t step = 1; step <= 5; ++step) Step(&t, step);
  ASSERT_TRUE(reader.AwaitStep(5));
  ASSERT_TRUE(RewindTo(2).ok());
  ASSERT_TRUE(reader.AwaitStep(2, 2)) << "though nobody trains on";
  ExpectPulled(reader);
}

TEST_F(FollowRpcTest, ReplacedWeightsEndReadersWhoComeAgain) {
  Trainer t = StartTrainer(Followed());
  Reader reader(follow_.get(), OfRun());
  Step(&t, 1);
  ASSERT_TRUE(reader.AwaitStep(1));
  grpc::ClientContext context;
  v1::LoadStateResponse response;
  const auto load = trainer_->LoadState(&context, &response);
  const std::vector<float> values(t.spec.tensors[1].elements, 0.25f);
  for (uint64_t k = 0; k < ChunkCount(t.spec, t.spec.tensors[1]); ++k) {
    v1::LoadStateRequest request = LoadRequest(t.spec, t.token, 1, k, values);
    request.set_replace(true);
    ASSERT_TRUE(load->Write(request));
  }
  load->WritesDone();
  ASSERT_TRUE(load->Finish().ok());
  const grpc::Status ended = reader.Finish().status;
  EXPECT_EQ(ended.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(ended.error_message(), HasSubstr("being replaced"));
  Reader again(follow_.get(), OfRun());
  ASSERT_TRUE(again.AwaitStep(1, 2));
  ExpectPulled(again);
}

TEST_F(FollowRpcTest, ARunThatIsAmendedCanBeFollowedFromThenOn) {
  v1::RunSpec spec = SmallSpec();
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  const grpc::Status before = Refusal(OfRun());
  EXPECT_EQ(before.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(before.error_message(), HasSubstr("RunSpec.follow"));
  spec.mutable_follow();
  ASSERT_TRUE(Amend(t.token, spec).ok());
  Reader reader(follow_.get(), OfRun());
  ASSERT_TRUE(reader.AwaitStep(1));
  ExpectPulled(reader);
  EXPECT_GT(Status("r1").bytes().following(), 0u);
}

TEST_F(FollowRpcTest, RefusesByName) {
  EXPECT_EQ(Refusal(OfRun("no")).error_code(), grpc::NOT_FOUND);
  ASSERT_TRUE(CreateRun(Followed()).ok());
  EXPECT_THAT(Refusal(OfRun()).error_message(), HasSubstr("weights"));
  v1::SubscribeRequest request = OfRun();
  request.add_digests(1);
  EXPECT_THAT(Refusal(request).error_message(), HasSubstr("1 digests, and run 'r1' has 3 tensors"));
  v1::RunSpec spec = Followed();
  spec.set_run_id("r2");
  spec.mutable_follow()->set_readers(2000);
  EXPECT_THAT(std::string(CreateRun(spec).status().message()),
              HasSubstr("follow.readers is 2000; wanted: at most 1024"));
}

TEST_F(FollowRpcTest, WhoFollowsAlreadyHearsWhenThereAreMoreThanTheSpecAllows) {
  v1::RunSpec spec = Followed();
  spec.mutable_follow()->set_readers(1);
  Trainer t = StartTrainer(spec);
  Reader first(follow_.get(), OfRun());
  ASSERT_TRUE(first.AwaitStep(0));
  const grpc::Status second = Refusal(OfRun());
  EXPECT_EQ(second.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(second.error_message(), HasSubstr("1 readers follow run 'r1'"));
  Step(&t, 1);
  EXPECT_TRUE(first.AwaitStep(1));
}

// More than there may be calls of others, over connections of their own: HTTP/2 lets one have 64.
TEST_F(FollowRpcTest, AsManyReadersAsTheRunsMayHaveKeepTheirCalls) {
  constexpr int kReaders = 550, kOfConnection = 50;
  std::vector<Trainer> trainers;
  for (const char* run : {"r1", "r2"}) {
    v1::RunSpec spec = MakeSpec(run, {{"w", {300}}});
    spec.mutable_follow()->set_readers(kReaders);
    trainers.push_back(StartTrainer(spec));
  }
  std::vector<std::unique_ptr<v1::FollowService::Stub>> stubs;
  std::deque<Reader> readers;
  for (const Trainer& trainer : trainers) {
    for (int i = 0; i < kReaders; ++i) {
      if (i % kOfConnection == 0) {
        grpc::ChannelArguments own;
        own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
        stubs.push_back(v1::FollowService::NewStub(
            grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), own)));
      }
      readers.emplace_back(stubs.back().get(), OfRun(trainer.spec.run_id));
      ASSERT_TRUE(readers.back().AwaitStep(0))
          << readers.size() << ": " << readers.back().Finish().status.error_message();
    }
  }
  for (Trainer& trainer : trainers) Step(&trainer, 1);
  for (Reader& reader : readers) ASSERT_TRUE(reader.AwaitStep(1));
}

}  // namespace
}  // namespace ballast::testing
