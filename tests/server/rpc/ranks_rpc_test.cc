// Several ranks of one run, and several micro-batches a step: the bits of the sum, whatever comes when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/eventually.h"
#include "tests/server/rpc/team_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;

class RanksRpcTest : public TeamRpcTest {};

TEST_F(RanksRpcTest, EveryRankGetsTheBitsOfTheMeanInRankOrder) {
  for (const uint32_t world : {2u, 3u, 7u, 64u}) {
    v1::RunSpec spec = SmallSpec();
    spec.set_run_id("r" + std::to_string(world));
    Team team = StartTeam(spec, world);
    const uint64_t steps = world < 64 ? 4 : 1;
    for (uint64_t step = 1; step <= steps; ++step) ExpectStep(&team, step, 1, static_cast<float>(1.0 / world));
    const v1::RunStatus status = Status(team.spec.run_id);
    EXPECT_EQ(status.ranks_size(), static_cast<int>(world));
    EXPECT_EQ(status.bytes().SerializeAsString(), status.plan().server().SerializeAsString());
  }
}

TEST_F(RanksRpcTest, MicroBatchesAreSummedOverRanksFirst) {
  v1::RunSpec spec = SmallSpec();
  spec.set_accumulation(3);
  Team team = StartTeam(spec, 2);
  ExpectStep(&team, 1, 3, 0.5f);
  ExpectStep(&team, 2, 2, 0.5f);
  ExpectStep(&team, 3, 1, 0.5f);
  EXPECT_EQ(Status("r1").loss(), 1.5);
  EXPECT_EQ(Status("r1").steps_applied(), 3u);
}

// The same contributions, from two ranks or from one in two micro-batches.
TEST_F(RanksRpcTest, TwoRanksAreTwoMicroBatchesOfOne) {
  v1::RunSpec spec = SmallSpec();
  spec.set_reduction(v1::REDUCTION_SUM);
  Team two = StartTeam(spec, 2);
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&two, step, 1, 1);
  spec.set_run_id("r2");
  spec.set_accumulation(2);
  Team one = StartTeam(spec, 1);
  for (uint64_t step = 1; step <= 3; ++step) {
    one.wires[0]->Begin(step);
    for (uint32_t micro = 0; micro < 2; ++micro) {
      one.wires[0]->BeginMicro(micro, micro == 1);
      for (uint32_t i = 0; i < 3; ++i) {
        for (v1::Gradient& chunk : Chunks(one.spec, i, GradientOf(one, i, step, /*rank=*/micro, /*micro=*/0))) {
          chunk.set_micro(micro);
          one.wires[0]->Chunk(chunk);
        }
      }
      micro == 0 ? one.wires[0]->EndMicro(0) : one.wires[0]->EndStep("", std::nullopt, 1);
    }
    const StepAnswer answer = ReadStep(one.wires[0].get());
    for (uint32_t i = 0; i < 3; ++i) {
      const bool equal = Equal(answer, *two.reference, i);
      EXPECT_TRUE(equal || step < 3) << i;
    }
  }
}

TEST_F(RanksRpcTest, AbsentOnOneRankCountsAsZeroAndAbsentOnAllIsUntouched) {
  Team team = StartTeam(SmallSpec(), 2);
  for (const auto& wire : team.wires) wire->Begin(1);
  const std::string only = GradientOf(team, 0, 1, 1, 0);
  for (const v1::Gradient& chunk : Chunks(team.spec, 0, only)) team.wires[1]->Chunk(chunk);
  team.wires[0]->EndStep(std::string(1, '\7'), 2.0);
  team.wires[1]->EndStep(std::string(1, '\6'), 4.0);
  team.reference->UpdateBySum(0, 1, Sum(team.spec, 0, {only}), 0.5f);
  for (const auto& wire : team.wires) {
    const StepAnswer answer = ReadStep(wire.get());
    ASSERT_TRUE(answer.result);
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
    EXPECT_EQ(answer.weights.size(), 1u);
    EXPECT_TRUE(Equal(answer, *team.reference, 0));
  }
  EXPECT_EQ(Status("r1").loss(), 3.0);
}

TEST_F(RanksRpcTest, RanksThatDisagreeHaveTheStepAbortedAndGoOn) {
  v1::RunSpec spec = SmallSpec();
  spec.set_accumulation(2);
  Team team = StartTeam(spec, 2);
  team.wires[0]->Begin(1, 1e-3);
  for (const v1::Gradient& chunk : Chunks(team.spec, 0, GradientOf(team, 0, 1, 0, 0))) {
    team.wires[0]->Chunk(chunk);
  }
  team.wires[1]->Begin(1, 2e-3);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const StepAnswer answer = ReadStep(team.wires[rank].get());
    ASSERT_TRUE(answer.result);
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_ABORTED);
    EXPECT_EQ(answer.result->reason(), "disagreement");
    EXPECT_THAT(answer.result->detail(),
                AnyOf(HasSubstr("rank 1 gives groups[0].lr = 0.002, rank 0 gives groups[0].lr = 0.001; all must"),
                      HasSubstr("rank 0 gives groups[0].lr = 0.001, rank 1 gives groups[0].lr = 0.002; all must")));
    EXPECT_TRUE(answer.weights.empty());
    team.wires[rank]->EndStep(std::string(1, '\7'));  // too late, and ignored
  }
  for (const auto& wire : team.wires) wire->Begin(2);
  team.wires[0]->BeginMicro(0, true);
  team.wires[1]->BeginMicro(0, false);
  for (const auto& wire : team.wires) {
    const StepAnswer answer = ReadStep(wire.get());
    EXPECT_THAT(answer.result->detail(), AnyOf(HasSubstr("rank 1 has at least 2, rank 0 has 1"),
                                               HasSubstr("rank 0 has 1, rank 1 has at least 2")));
  }
  ExpectStep(&team, 3, 2, 0.5f);
}

// A rank whose connection is cut resumes: the others wait, and get the same bits.
TEST_F(RanksRpcTest, ACutRankResumesWithinTheStep) {
  Team team = StartTeam(SmallSpec(), 2);
  for (const auto& wire : team.wires) wire->Begin(1);
  const auto first = Chunks(team.spec, 0, GradientOf(team, 0, 1, 1, 0));
  for (size_t k = 0; k < 3; ++k) team.wires[1]->Chunk(first[k]);
  EXPECT_SOON(Status("r1").received_bytes(), Ge(3 * first[0].data().size()));
  team.wires[1]->Hang();
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_rank(1);
  request.set_world(2);
  request.set_session_token(team.tokens[1]);
  v1::AttachResponse resumed;
  ASSERT_TRUE(Attach(request, &resumed).ok());
  EXPECT_TRUE(resumed.step_open());
  team.wires[1] = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(team.wires[1]->Open(team.tokens[1]));
  team.wires[1]->Begin(1);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (uint32_t i = 0; i < 3; ++i) {
      for (const v1::Gradient& chunk : Chunks(team.spec, i, GradientOf(team, i, 1, rank, 0))) {
        team.wires[rank]->Chunk(chunk);
      }
    }
    team.wires[rank]->EndStep();
  }
  UpdateReference(&team, 1, 1, 0.5f);
  for (const auto& wire : team.wires) {
    const StepAnswer answer = ReadStep(wire.get());
    ASSERT_TRUE(answer.result);
    for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *team.reference, i)) << i;
  }
}

// A rank that comes back as a new process: the step closes for the others, who get the weights of what was updated.
TEST_F(RanksRpcTest, ARestartedRankTearsTheStepForAll) {
  Team team = StartTeam(SmallSpec(), 2);
  for (const auto& wire : team.wires) wire->Begin(1);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (const v1::Gradient& chunk : Chunks(team.spec, 2, GradientOf(team, 2, 1, rank, 0))) {
      team.wires[rank]->Chunk(chunk);
    }
  }
  std::vector<std::string> gradients = {GradientOf(team, 2, 1, 0, 0), GradientOf(team, 2, 1, 1, 0)};
  team.reference->UpdateBySum(2, 1, Sum(team.spec, 2, gradients), 0.5f);
  ASSERT_TRUE(team.wires[1]->AwaitWeights());
  const v1::AttachResponse again = AttachFresh("r1", /*takeover=*/true, 1, 2);
  EXPECT_EQ(again.resume_step(), 2u);
  EXPECT_EQ(again.last_result().outcome(), v1::STEP_OUTCOME_PARTIAL);
  const StepAnswer torn = ReadStep(team.wires[0].get());
  ASSERT_TRUE(torn.result);
  EXPECT_EQ(torn.result->outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_THAT(torn.result->tensors_not_applied(), ElementsAre(0, 1));
  EXPECT_TRUE(Equal(torn, *team.reference, 2));
  // What rank 0 still says of the step is ignored; both go on with the next.
  team.wires[0]->EndStep(std::string(1, '\3'));
  team.tokens[1] = again.session_token();
  team.wires[1] = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(team.wires[1]->Open(team.tokens[1]));
  ExpectStep(&team, 2, 1, 0.5f);
}

TEST_F(RanksRpcTest, TheWorldIsThatOfTheFirstRankAndBounded) {
  Team team = StartTeam(SmallSpec(), 2);
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_world(1);
  v1::AttachResponse response;
  EXPECT_THAT(Attach(request, &response).error_message(), HasSubstr("trains with 2 ranks, and rank 0 is attached"));
  request.set_world(3);
  EXPECT_THAT(Attach(request, &response).error_message(), HasSubstr("created for 1 to 2 ranks"));
  request.set_world(2);
  request.set_rank(2);
  EXPECT_THAT(Attach(request, &response).error_message(), HasSubstr("rank is 2 of world 2"));
}

}  // namespace
}  // namespace ballast::testing
