// A run that is given another spec in the middle: what is added trains, and the rest goes on to the bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/server/rpc/amend_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(AmendRpcTest, WhatIsAddedTrainsAndTheRestGoesOnToTheBit) {
  for (const uint32_t world : {1u, 2u, 8u}) {
    for (const auto commit : {v1::COMMIT_MODE_RELEASE, v1::COMMIT_MODE_STAGED}) {
      SCOPED_TRACE(::testing::Message() << world << " ranks, commit " << commit);
      v1::RunSpec spec = ForWorld(Spec(), world);
      spec.set_commit(commit);
      Team team = StartTeam(spec, world);
      const float scale = 1.0f / static_cast<float>(world);
      for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&team, step, 1, scale);
      const auto before = Stored("r1", kKept);

      v1::AmendRunResponse amended;
      const grpc::Status s = Amend(team.tokens[world - 1], Grown(spec), &amended);
      ASSERT_TRUE(s.ok()) << s.error_message();
      EXPECT_TRUE(amended.amended());
      EXPECT_EQ(amended.step(), 3u);
      EXPECT_EQ(amended.generation(), 2u);
      EXPECT_EQ(amended.tensors_added(), 2u);
      for (const auto& wire : team.wires) ExpectRewound(wire.get(), 3);
      v1::RunStatus status = Status("r1");
      EXPECT_EQ(status.step(), 3u);
      EXPECT_FALSE(status.weights_loaded());
      EXPECT_EQ(status.bytes().SerializeAsString(), status.plan().server().SerializeAsString());
      EXPECT_EQ(status.bytes().SerializeAsString(), amended.plan().server().SerializeAsString());

      Follow(&team, Grown(spec));
      EXPECT_EQ(Stored("r1", kKept), before);
      for (uint64_t step = 4; step <= 6; ++step) ExpectStep(&team, step, 1, scale);
      StartAnew(&team);
    }
  }
}

// Time and again, so that planes lie in several places; a snapshot has all of them.
TEST_F(AmendRpcTest, ARunGrowsTimeAndAgainAndItsNewSnapshotsAreWhole) {
  v1::RunSpec spec = Spec();
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(2);
  Team team = StartTeam(spec, 1);
  uint64_t step = 0;
  for (int times = 0; times < 3; ++times) {
    for (int i = 0; i < 2; ++i) ExpectStep(&team, ++step, 1, 1);
    AddTensor(&spec, "added." + std::to_string(times), {200 * (times + 1), 30}, 0);
    v1::AmendRunResponse amended;
    ASSERT_TRUE(Amend(team.tokens[0], spec, &amended).ok());
    ASSERT_EQ(amended.snapshots_dropped_size(), 1);
    EXPECT_EQ(amended.snapshots_dropped(0), step);
    EXPECT_EQ(Status("r1").snapshot_steps_size(), 0);
    Follow(&team, spec);
  }
  for (int i = 0; i < 2; ++i) ExpectStep(&team, ++step, 1, 1);
  const auto kept = Stored("r1", 5);
  SendStep(&team, step + 1, {});
  ASSERT_TRUE(ReadStep(team.wires[0].get()).result);
  ASSERT_TRUE(RewindTo(step).ok());
  EXPECT_EQ(Stored("r1", 5), kept);
  Attach(&team);
  OpenStreams(&team);
  ExpectStep(&team, step + 1, 1, 1);
}

TEST_F(AmendRpcTest, HyperparametersAndARuleOfTheSameStateChangeAndNothingIsLoaded) {
  v1::RunSpec spec = Spec();
  Team team = StartTeam(spec, 2);
  spec.set_ranks(2);
  for (uint64_t step = 1; step <= 2; ++step) ExpectStep(&team, step, 1, 0.5f);
  (*spec.mutable_groups(0)->mutable_hyper())["eps"] = 1e-3;
  spec.mutable_groups(0)->set_rule("adam");
  spec.set_accumulation(3);
  v1::AmendRunResponse amended;
  const grpc::Status s = Amend(team.tokens[0], spec, &amended);
  ASSERT_TRUE(s.ok()) << s.error_message();
  EXPECT_EQ(amended.tensors_added(), 0u);
  EXPECT_TRUE(Status("r1").weights_loaded());
  Follow(&team, spec);
  for (uint64_t step = 3; step <= 5; ++step) ExpectStep(&team, step, 3, 0.5f);
}

// Beside one that was not amended, with the same gradients: averages, counts and random bits go on.
TEST_F(AmendRpcTest, WhatStepsHaveLearnedGoesOn) {
  std::vector<std::string> last;
  for (const bool amends : {false, true}) {
    v1::RunSpec spec = Spec(amends ? "amended" : "plain");
    spec.mutable_tensor_clip()->set_absolute(0.1);
    spec.mutable_tensor_clip()->set_warmup_steps(2);
    Trainer t = StartTrainer(spec);
    StepAnswer answer;
    for (uint64_t step = 1; step <= 8; ++step) {
      if (amends && step == 5) {
        AddTensor(&spec, "added", {10}, 0);
        ASSERT_TRUE(Amend(t.token, spec).ok());
        ExpectRewound(t.wire.get(), 4);
        t.token = AttachFresh("amended").session_token();
        ASSERT_TRUE(LoadAdded(ToRunSpec(spec, config_.limits).value(), t.token, kKept).ok());
        t.token = AttachFresh("amended").session_token();
        t.wire = std::make_unique<Wire>(trainer_.get());
        ASSERT_TRUE(t.wire->Open(t.token));
      }
      t.wire->Begin(step);
      for (uint32_t i = 0; i < kKept; ++i) SendAll(t, i, step);
      t.wire->EndStep(amends && step >= 5 ? std::string(1, '\4') : "", 1.5);
      answer = ReadStep(t.wire.get());
      ASSERT_TRUE(answer.result);
    }
    for (uint32_t i = 0; i < kKept; ++i) last.push_back(answer.weights.at(i));
  }
  EXPECT_EQ(last[0], last[2]);
  EXPECT_EQ(last[1], last[3]);
}

TEST_F(AmendRpcTest, MetricsAndHistoryGoOn) {
  Team team = StartTeam(Spec(), 1);
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&team, step, 1, 1);
  ASSERT_TRUE(Amend(team.tokens[0], Grown(Spec())).ok());
  Follow(&team, Grown(Spec()));
  for (uint64_t step = 4; step <= 5; ++step) ExpectStep(&team, step, 1, 1);
  EXPECT_THAT(metrics_.Serialize(),
              AllOf(HasSubstr("ballast_steps_applied_total{run_id=\"r1\"} 5"),
                    HasSubstr("ballast_runs{state=\"training\"} 1"), HasSubstr("ballast_runs{state=\"waiting\"} 0")));
  EXPECT_EQ(Status("r1").steps_applied(), 5u);
  grpc::ClientContext context;
  v1::GetHistoryRequest request;
  request.set_run_id("r1");
  v1::GetHistoryResponse history;
  ASSERT_TRUE(admin_->GetHistory(&context, request, &history).ok());
  ASSERT_EQ(history.steps_size(), 5);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(history.steps(i).step(), static_cast<uint64_t>(i + 1));
}

TEST_F(AmendRpcTest, TheSpecThatTheRunHasChangesNothing) {
  Team team = StartTeam(Spec(), 1);
  ExpectStep(&team, 1, 1, 1);
  v1::AmendRunResponse answer;
  ASSERT_TRUE(Amend(team.tokens[0], Spec(), &answer).ok());
  EXPECT_FALSE(answer.amended());
  ExpectStep(&team, 2, 1, 1);
}

TEST_F(AmendRpcTest, ARefusalLeavesTheRunAsItWas) {
  Team team = StartTeam(Spec(), 1);
  ExpectStep(&team, 1, 1, 1);
  v1::RunSpec huge = Spec(), shorter = Spec(), renamed = Spec();
  AddTensor(&huge, "huge", {1 << 14, 1 << 14}, 0);
  shorter.mutable_tensors()->RemoveLast();
  renamed.set_run_id("r2");
  EXPECT_THAT(Amend(team.tokens[0], huge).error_message(),
              AllOf(HasSubstr("run 'r1' with this spec needs"), HasSubstr("and while it is amended"),
                    HasSubstr(" free"), HasSubstr("the run goes on as it was")));
  EXPECT_THAT(Amend(team.tokens[0], shorter).error_message(), HasSubstr("tensor 'layers.0.b' is left out"));
  EXPECT_THAT(Amend(team.tokens[0], renamed).error_message(), HasSubstr("a run keeps its name"));
  EXPECT_EQ(Amend("no token", Spec()).error_code(), grpc::NOT_FOUND);
  ExpectStep(&team, 2, 1, 1);
  EXPECT_EQ(Status("r1").generation(), 1u);
  team.wires[0]->Begin(3);
  team.wires[0]->Chunk(Chunks(team.spec, 1, Gradient(team.spec, 1, 3))[0]);
  for (auto told = team.wires[0]->Read(); told && told->credit().acknowledged() == 0;) told = team.wires[0]->Read();
  const grpc::Status open = Amend(team.tokens[0], Grown(Spec()));
  EXPECT_EQ(open.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(open.error_message(), HasSubstr("between two steps, and step 3 of run 'r1' is open"));
}

TEST_F(AmendRpcTest, ARunWithoutWeightsIsNotAmended) {
  ASSERT_TRUE(CreateRun(Spec()).ok());
  const grpc::Status refused = Amend(AttachFresh("r1").session_token(), Grown(Spec()));
  EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("'r1' has no weights yet"));
}

// As when the rank that amended it is gone before it has sent the new weights.
TEST_F(AmendRpcTest, UntilTheNewWeightsComeTheRunSaysWhatItLacks) {
  Team team = StartTeam(Spec(), 1);
  for (uint64_t step = 1; step <= 2; ++step) ExpectStep(&team, step, 1, 1);
  ASSERT_TRUE(Amend(team.tokens[0], Grown(Spec())).ok());
  const std::string why = "AmendRun has added 2 tensors, from 'layers.1.w' on, that have no weights yet";
  Attach(&team);
  OpenStreams(&team);
  team.wires[0]->Begin(3);
  EXPECT_THAT(team.wires[0]->Finish().error_message(), HasSubstr(why));
  Attach(&team);
  EXPECT_THAT(Amend(team.tokens[0], Spec()).error_message(), HasSubstr("is left out"));
  v1::RunSpec more = Grown(Spec());
  AddTensor(&more, "more", {3}, 0);
  EXPECT_THAT(Amend(team.tokens[0], more).error_message(), HasSubstr(why));
  grpc::ClientContext context;
  v1::PullRequest pull;
  pull.set_run_id("r1");
  const auto reader = trainer_->Pull(&context, pull);
  v1::Weights weights;
  EXPECT_FALSE(reader->Read(&weights));
  EXPECT_THAT(reader->Finish().error_message(), HasSubstr(why));
  const RunSpec grown = ToRunSpec(Grown(Spec()), config_.limits).value();
  EXPECT_THAT(LoadAdded(grown, team.tokens[0], 0, /*replace=*/false).error_message(),
              HasSubstr("LoadState is for before the first step"));
  EXPECT_THAT(LoadAdded(grown, team.tokens[0], kKept + 1).error_message(), HasSubstr("tensor 'layers.1.w'"));
  Follow(&team, Grown(Spec()));
  for (uint64_t step = 3; step <= 4; ++step) ExpectStep(&team, step, 1, 1);
}

TEST_F(AmendRpcTest, AClientThatGoesByAnotherSpecIsToldSo) {
  Team team = StartTeam(Spec(), 1);
  ExpectStep(&team, 1, 1, 1);
  const std::string stale = CreateRun(Spec())->spec_sha256();
  v1::AmendRunResponse amended;
  ASSERT_TRUE(Amend(team.tokens[0], Grown(Spec()), &amended).ok());
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_spec_sha256(stale);
  v1::AttachResponse response;
  const grpc::Status refused = RpcTest::Attach(request, &response);
  EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("the run was amended (AmendRun)"));
  EXPECT_THAT(std::string(CreateRun(Spec()).status().message()), HasSubstr("exists with another spec"));
  request.set_spec_sha256(amended.spec_sha256());
  EXPECT_TRUE(RpcTest::Attach(request, &response).ok());
  EXPECT_EQ(CreateRun(Grown(Spec()))->spec_sha256(), amended.spec_sha256());
}

}  // namespace
}  // namespace ballast::testing
