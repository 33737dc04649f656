// A run goes back to one of its snapshots: what follows is to the bit what followed the first time, and what it would
// have been had the run never left that step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "proto/rewound.h"

#include "tests/server/rpc/team_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::Status FromGrpc(const grpc::Status& s) {
  return {static_cast<absl::StatusCode>(s.error_code()), s.error_message()};
}

class RewindRpcTest : public TeamRpcTest {
 protected:
  static v1::RunSpec KeptSpec(uint32_t snapshots, uint32_t every) {
    v1::RunSpec spec =
        MakeSpec("r1", {{"embed.weight", {90, 100}}, {"layers.0.w", {64, 64}, "fp32"}, {"layers.0.b", {5}}});
    spec.mutable_rewind()->set_snapshots(snapshots);
    spec.mutable_rewind()->set_every(every);
    return spec;
  }

  absl::StatusOr<v1::RewindResponse> Rewind(const v1::RewindRequest& request) {
    grpc::ClientContext context;
    v1::RewindResponse response;
    const grpc::Status s = admin_->Rewind(&context, request, &response);
    if (!s.ok()) return FromGrpc(s);
    return response;
  }
  static v1::RewindRequest To(uint64_t step) {
    v1::RewindRequest request;
    request.set_run_id("r1");
    request.set_to_step(step);
    return request;
  }
  static v1::RewindRequest Back(uint32_t steps) {
    v1::RewindRequest request;
    request.set_run_id("r1");
    request.set_steps_back(steps);
    return request;
  }

  // Every rank again, as its process does that was told of a rewind.
  std::vector<v1::AttachResponse> Rejoin(Team* team) {
    std::vector<v1::AttachResponse> granted;
    const auto world = static_cast<uint32_t>(team->wires.size());
    for (uint32_t rank = 0; rank < world; ++rank) granted.push_back(AttachFresh("r1", false, rank, world));
    for (uint32_t rank = 0; rank < world; ++rank) {
      team->tokens[rank] = granted[rank].session_token();
      team->wires[rank] = std::make_unique<Wire>(trainer_.get());
      EXPECT_TRUE(team->wires[rank]->Open(team->tokens[rank]));
    }
    return granted;
  }
  // Every rank's stream has ended by it.
  static void ExpectTold(Team* team, uint64_t step) {
    for (const auto& wire : team->wires) {
      const absl::Status s = FromGrpc(wire->Finish());
      EXPECT_EQ(RewoundTo(s), step) << s;
    }
  }

  // What rank 0 gets of each step; it is what every rank gets.
  std::vector<StepAnswer> Train(Team* team, uint64_t first, uint64_t last) {
    std::vector<StepAnswer> answers;
    for (uint64_t step = first; step <= last; ++step) {
      SendStep(team, step, {.shuffle = static_cast<uint32_t>(sends_++)});
      for (const auto& wire : team->wires) {
        StepAnswer answer = ReadStep(wire.get());
        EXPECT_TRUE(answer.result.has_value());
        if (!answer.result) return answers;
        EXPECT_EQ(answer.result->step(), step);
        if (wire == team->wires[0]) answers.push_back(std::move(answer));
      }
    }
    return answers;
  }
  static void ExpectSame(const std::vector<StepAnswer>& first, const std::vector<StepAnswer>& again) {
    ASSERT_EQ(first.size(), again.size());
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(first[i].weights, again[i].weights) << "step " << first[i].result->step();
      EXPECT_EQ(first[i].labels, again[i].labels);
      EXPECT_EQ(first[i].result->SerializeAsString(), again[i].result->SerializeAsString());
    }
  }
  // Straight on from the run's first step, whatever the run did.
  static void TrainReference(Team* team, uint64_t first, uint64_t last) {
    for (uint64_t step = first; step <= last; ++step) {
      UpdateReference(team, step, 1, 1.0f / static_cast<float>(team->wires.size()));
    }
  }

 private:
  uint64_t sends_ = 0;
};

// The averages of their norms go back, too; and a gradient that is being measured when the run goes back updates
// nothing.
TEST_F(RewindRpcTest, TensorsThatAreClippedByThemselvesGoBackToo) {
  v1::RunSpec spec = KeptSpec(1, 10);
  spec.mutable_tensor_clip()->set_absolute(0.1);
  spec.mutable_tensor_clip()->set_warmup_steps(5);
  Team team = StartTeam(spec, 1);
  Train(&team, 1, 10);
  const auto first = Train(&team, 11, 13);
  for (int times = 0; times < 25; ++times) {
    SCOPED_TRACE(times);
    SendStep(&team, 14, {});
    ASSERT_TRUE(Rewind(To(10)).ok());
    Rejoin(&team);
    ExpectSame(first, Train(&team, 11, 13));
  }
}

// Steps 21 to 30 twice, then on: in both modes, by one rank and by two, the second time in another order of arrival.
TEST_F(RewindRpcTest, StepsAfterARewindRepeatToTheBit) {
  for (const v1::CommitMode commit : {v1::COMMIT_MODE_RELEASE, v1::COMMIT_MODE_STAGED}) {
    for (const uint32_t world : {1u, 2u}) {
      SCOPED_TRACE(absl::StrCat(v1::CommitMode_Name(commit), ", ", world, " ranks"));
      v1::RunSpec spec = KeptSpec(2, 10);
      spec.set_commit(commit);
      if (commit == v1::COMMIT_MODE_STAGED) spec.set_max_grad_norm(0.5);
      Team team = StartTeam(spec, world);
      Train(&team, 1, 20);
      const auto first = Train(&team, 21, 30);
      EXPECT_THAT(Status("r1").snapshot_steps(), ElementsAre(20, 30));
      const auto rewound = Rewind(To(20));
      ASSERT_TRUE(rewound.ok()) << rewound.status();
      EXPECT_EQ(rewound->step(), 20u);
      EXPECT_EQ(rewound->generation(), 2u);
      ExpectTold(&team, 20);
      for (const v1::AttachResponse& granted : Rejoin(&team)) {
        EXPECT_EQ(granted.resume_step(), 21u);
        EXPECT_EQ(granted.generation(), 2u);
        EXPECT_EQ(granted.last_result().step(), 20u);
      }
      ExpectSame(first, Train(&team, 21, 30));
      EXPECT_THAT(Status("r1").snapshot_steps(), ElementsAre(20, 30));
      EXPECT_EQ(Status("r1").rewinds(), 1u);
      server_.reset();
      StartServer();
    }
  }
}

TEST_F(RewindRpcTest, ARewindLeavesNoTraceOfLaterSteps) {
  Team team = StartTeam(KeptSpec(3, 5), 2);
  Train(&team, 1, 17);
  ASSERT_TRUE(Rewind(To(10)).ok());
  Rejoin(&team);
  TrainReference(&team, 1, 10);
  for (uint64_t step = 11; step <= 14; ++step) ExpectStep(&team, step, 1, 0.5f);
}

TEST_F(RewindRpcTest, EachRankGetsItsStateOfThatStepBack) {
  Team team = StartTeam(KeptSpec(2, 2), 2);
  for (uint64_t step = 1; step <= 5; ++step) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      team.wires[rank]->Begin(step);
      v1::TrainRequest end;
      end.mutable_step_end()->set_client_state(absl::StrCat("rank ", rank, " after ", step));
      team.wires[rank]->EndMicro(0, "\7");  // no gradients
      team.wires[rank]->Send(end);
    }
    for (const auto& wire : team.wires) ASSERT_TRUE(ReadStep(wire.get()).result);
  }
  ASSERT_TRUE(Rewind(To(2)).ok());
  const auto granted = Rejoin(&team);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(granted[rank].client_state(), absl::StrCat("rank ", rank, " after 2"));
    EXPECT_EQ(granted[rank].client_state_step(), 2u);
  }
}

// Tensor 1 has no gradient in even steps; a rewind puts its count of updates back too.
TEST_F(RewindRpcTest, TensorsThatWereAbsentComeBackWithTheirCounts) {
  Team team = StartTeam(KeptSpec(2, 3), 1);
  const auto send = [&](uint64_t step) {
    Wire* const wire = team.wires[0].get();
    wire->Begin(step);
    for (const uint32_t i : {0u, 1u, 2u}) {
      if (i == 1 && step % 2 == 0) continue;
      for (const v1::Gradient& chunk : Chunks(team.spec, i, Gradient(team.spec, i, step))) wire->Chunk(chunk);
    }
    wire->EndStep(step % 2 == 0 ? "\2" : "");
    return ReadStep(wire);
  };
  std::vector<StepAnswer> first, again;
  for (uint64_t step = 1; step <= 8; ++step) first.push_back(send(step));
  ASSERT_TRUE(Rewind(To(3)).ok());
  Rejoin(&team);
  for (uint64_t step = 4; step <= 8; ++step) again.push_back(send(step));
  ExpectSame({first.begin() + 3, first.end()}, again);
}

// In release some of the open step's tensors are updated already, and others half in.
TEST_F(RewindRpcTest, TheOpenStepIsUndone) {
  Team team = StartTeam(KeptSpec(1, 4), 1);
  Train(&team, 1, 4);
  const auto first = Train(&team, 5, 6);
  Wire* const wire = team.wires[0].get();
  wire->Begin(7);
  for (const v1::Gradient& chunk : Chunks(team.spec, 1, Gradient(team.spec, 1, 77))) wire->Chunk(chunk);
  wire->Chunk(Chunks(team.spec, 0, Gradient(team.spec, 0, 77))[0]);
  for (auto answer = wire->Read(); !answer->has_weights(); answer = wire->Read()) ASSERT_TRUE(answer);
  ASSERT_TRUE(Rewind(Back(0)).ok());
  ExpectTold(&team, 4);
  Rejoin(&team);
  ExpectSame(first, Train(&team, 5, 6));
}

// The rewind comes right behind the step that closed, when its snapshot has hardly begun; and again before any rank is
// back.
TEST_F(RewindRpcTest, ASnapshotMayBeGoneBackToAsSoonAsItsStepHasClosed) {
  Team team = StartTeam(KeptSpec(1, 1), 1);
  TrainReference(&team, 1, 1);
  for (uint64_t step = 1; step <= 10; ++step) {
    Train(&team, step, step);
    const auto rewound = Rewind(Back(0));
    ASSERT_TRUE(rewound.ok()) << rewound.status();
    EXPECT_EQ(rewound->step(), step);
    ASSERT_TRUE(Rewind(To(step)).ok());
    Rejoin(&team);
    if (step > 1) TrainReference(&team, step, step);
  }
  ExpectStep(&team, 11, 1, 1);
}

TEST_F(RewindRpcTest, AStepWithoutASnapshotIsRefusedAndTheKeptAreNamed) {
  Team team = StartTeam(KeptSpec(2, 5), 1);
  EXPECT_THAT(Rewind(Back(1)).status().message(), HasSubstr("none is kept yet, and one is taken every 5 steps"));
  Train(&team, 1, 18);
  const absl::Status evicted = Rewind(To(5)).status();
  EXPECT_EQ(evicted.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(evicted.message(), AllOf(HasSubstr("run 'r1', at step 18, has no snapshot of step 5"),
                                       HasSubstr("kept are those of steps 10, 15")));
  EXPECT_FALSE(Rewind(To(12)).ok());
  EXPECT_EQ(Status("r1").generation(), 1u);
  Train(&team, 19, 19);  // nobody was thrown out
  EXPECT_EQ(Rewind(Back(5))->step(), 10u);
  EXPECT_THAT(Status("r1").snapshot_steps(), ElementsAre(10));
  EXPECT_EQ(Status("r1").step(), 10u);
}

TEST_F(RewindRpcTest, ARunWithoutSnapshotsSaysHowToHaveThem) {
  Team team = StartTeam(SmallSpec(), 1);
  EXPECT_THAT(Rewind(Back(0)).status().message(), HasSubstr("RunSpec.rewind.snapshots of 1 or more"));
  v1::RewindRequest elsewhere = Back(0);
  elsewhere.set_run_id("r2");
  EXPECT_EQ(Rewind(elsewhere).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Status("r1").snapshot_steps(), IsEmpty());
}

TEST_F(RewindRpcTest, AnOldTokenIsToldOfTheRewind) {
  Team team = StartTeam(KeptSpec(2, 2), 1);
  Train(&team, 1, 4);
  ASSERT_TRUE(Rewind(To(4)).ok());
  ASSERT_TRUE(Rewind(To(2)).ok());
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_session_token(team.tokens[0]);
  v1::AttachResponse response;
  EXPECT_EQ(RewoundTo(FromGrpc(Attach(request, &response))), 2u);
  Wire old(trainer_.get());
  EXPECT_FALSE(old.Open(team.tokens[0]));
  EXPECT_EQ(FromGrpc(old.Finish()).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RewindRpcTest, AStoppedRunGoesOnFromBeforeItWasStopped) {
  v1::RunSpec spec = KeptSpec(1, 3);
  spec.set_nonfinite(v1::NONFINITE_POLICY_STOP);
  spec.set_commit(v1::COMMIT_MODE_STAGED);
  Team team = StartTeam(spec, 1);
  const auto good = Train(&team, 1, 4);
  team.poisoned.insert({5, 0});
  SendStep(&team, 5, {});
  EXPECT_EQ(ReadStep(team.wires[0].get()).result->outcome(), v1::STEP_OUTCOME_ABORTED);
  EXPECT_THAT(Status("r1").failure(), HasSubstr("is stopped"));
  ASSERT_TRUE(Rewind(Back(1)).ok());
  EXPECT_EQ(Status("r1").failure(), "");
  team.poisoned.clear();
  Rejoin(&team);
  ExpectSame({good.begin() + 3, good.end()}, Train(&team, 4, 4));
  Train(&team, 5, 6);
}

// A spike is seen while its step is judged, and the order may come just then.
TEST_F(RewindRpcTest, AStepThatIsBeingJudgedIsWaitedFor) {
  v1::RunSpec spec = KeptSpec(1, 2);
  spec.set_commit(v1::COMMIT_MODE_STAGED);
  spec.set_max_grad_norm(1);
  Team team = StartTeam(spec, 1);
  Train(&team, 1, 2);
  const auto first = Train(&team, 3, 3);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(Rewind(To(2)).ok());
    Rejoin(&team);
    SendStep(&team, 3, {});
    ASSERT_TRUE(Rewind(To(2)).ok());  // wherever the step is
    Rejoin(&team);
    ExpectSame(first, Train(&team, 3, 3));
  }
}

// A process is lost after a tensor was updated: with the policy that is undone, on a step at which a snapshot is due,
// too.
TEST_F(RewindRpcTest, ATornStepTakesTheRunBack) {
  v1::RunSpec spec = KeptSpec(1, 2);
  spec.set_on_torn(v1::TORN_POLICY_REWIND);
  Team team = StartTeam(spec, 2);
  Train(&team, 1, 2);
  const auto first = Train(&team, 3, 3);
  for (const auto& wire : team.wires) wire->Begin(4);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (const v1::Gradient& chunk : Chunks(team.spec, 2, GradientOf(team, 2, 4, rank, 0))) {
      team.wires[rank]->Chunk(chunk);
    }
  }
  ASSERT_TRUE(team.wires[1]->AwaitWeights());
  AttachFresh("r1", /*takeover=*/true, 1, 2);
  EXPECT_EQ(RewoundTo(FromGrpc(team.wires[0]->Finish())), 2u);
  for (const v1::AttachResponse& granted : Rejoin(&team)) EXPECT_EQ(granted.resume_step(), 3u);
  ExpectSame(first, Train(&team, 3, 3));
  Train(&team, 4, 4);
  EXPECT_EQ(Status("r1").steps_partial(), 1u);
  EXPECT_THAT(Status("r1").snapshot_steps(), ElementsAre(4));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_rewinds_total{reason=\"other\",run_id=\"r1\"} 1"));
}

// Before the first snapshot there is nothing to go back to: the step stands as it is.
TEST_F(RewindRpcTest, ATornStepWithoutASnapshotBeforeItStands) {
  v1::RunSpec spec = KeptSpec(1, 1);
  spec.set_on_torn(v1::TORN_POLICY_REWIND);
  Team team = StartTeam(spec, 1);
  team.wires[0]->Begin(1);
  for (const v1::Gradient& chunk : Chunks(team.spec, 2, GradientOf(team, 2, 1, 0, 0))) team.wires[0]->Chunk(chunk);
  ASSERT_TRUE(team.wires[0]->AwaitWeights());
  const v1::AttachResponse granted = AttachFresh("r1", /*takeover=*/true);
  EXPECT_EQ(granted.resume_step(), 2u);
  EXPECT_EQ(granted.last_result().outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_EQ(Status("r1").rewinds(), 0u);
}

TEST_F(RewindRpcTest, MetricsCountRewindsByWhoAsked) {
  Team team = StartTeam(KeptSpec(2, 1), 1);
  Train(&team, 1, 3);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_snapshots{run_id=\"r1\"} 2"));
  ASSERT_TRUE(Rewind(Back(1)).ok());
  v1::RewindRequest request = Back(0);
  request.set_reason("trainer");
  ASSERT_TRUE(Rewind(request).ok());
  EXPECT_THAT(metrics_.Serialize(), AllOf(HasSubstr("ballast_rewinds_total{reason=\"operator\",run_id=\"r1\"} 1"),
                                          HasSubstr("ballast_rewinds_total{reason=\"trainer\",run_id=\"r1\"} 1"),
                                          HasSubstr("ballast_snapshots{run_id=\"r1\"} 1")));
}

}  // namespace
}  // namespace ballast::testing
