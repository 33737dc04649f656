// Staged runs: all gradients are kept and judged before any is applied. Clipping, skipped and aborted steps, values
// that come at the end, and what a lost process leaves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/server/rpc/team_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StagedRpcTest : public TeamRpcTest {
 protected:
  // The squares of the whole gradient in double, added up as they come.
  static double PlainNorm(const Team& team, uint64_t step, uint32_t micros, float scale) {
    double sum = 0;
    for (uint32_t i = 0; i < team.spec.tensors.size(); ++i) {
      for (const float x : SumOf(team, i, step, micros)) {
        const double g = static_cast<double>(x) * static_cast<double>(scale);
        sum += g * g;
      }
    }
    return std::sqrt(sum);
  }

  // A step that was not applied, as every rank is told of it.
  static v1::StepResult ExpectUntouched(Team* team, v1::StepOutcome outcome, const std::string& reason) {
    v1::StepResult first;
    for (size_t rank = 0; rank < team->wires.size(); ++rank) {
      const StepAnswer answer = ReadStep(team->wires[rank].get());
      EXPECT_TRUE(answer.result.has_value());
      if (!answer.result) return first;
      EXPECT_EQ(answer.result->outcome(), outcome) << answer.result->detail();
      EXPECT_EQ(answer.result->reason(), reason);
      EXPECT_TRUE(answer.weights.empty());
      EXPECT_THAT(answer.result->tensors_not_applied(), ElementsAre(0, 1, 2));
      EXPECT_EQ(answer.result->clip_coefficient(), 1);
      if (rank == 0) first = *answer.result;
      EXPECT_EQ(answer.result->SerializeAsString(), first.SerializeAsString()) << "rank " << rank;
    }
    return first;
  }
};

TEST_F(StagedRpcTest, TheWholeGradientIsClippedByItsNormBefore) {
  constexpr double kMost = 0.2;
  for (const uint32_t world : {1u, 2u, 3u}) {
    for (const uint32_t micros : {1u, 2u}) {
      SCOPED_TRACE(std::to_string(world) + " ranks, " + std::to_string(micros) + " micro-batches");
      v1::RunSpec spec = StagedSpec("r" + std::to_string(10 * world + micros));
      spec.set_max_grad_norm(kMost);
      spec.set_accumulation(micros);
      Team team = StartTeam(spec, world);
      const auto scale = static_cast<float>(1.0 / (4 * world));
      for (uint64_t step = 1; step <= 3; ++step) {
        SendStep(&team, step, {.micros = micros, .loss_scale = 4});
        const double norm = ExactNorm(team, step, micros, scale);
        const auto clip = static_cast<float>(std::min(1.0, kMost / (norm + 1e-6)));
        UpdateReference(&team, step, micros, scale, clip);
        const StepAnswer answer = ExpectApplied(&team);
        ASSERT_TRUE(answer.result);
        EXPECT_EQ(answer.result->grad_norm(), norm);
        EXPECT_NEAR(norm, PlainNorm(team, step, micros, scale), 1e-6 * norm);
        EXPECT_EQ(answer.result->clip_coefficient(), static_cast<double>(clip));
        EXPECT_GT(norm, kMost);
      }
      const v1::RunStatus status = Status(spec.run_id());
      EXPECT_EQ(status.bytes().SerializeAsString(), status.plan().server().SerializeAsString());
      double layers_sq = 0;
      for (const v1::LayerStatistics& layer : status.layers()) layers_sq += std::pow(layer.gradient_norm(), 2);
      EXPECT_NEAR(std::sqrt(layers_sq), status.grad_norm(), 1e-9) << "layers' norms, too, are those before clipping";
    }
  }
}

// One micro-batch of one rank is kept as it came, in bf16 or fp32; the norm is taken of it.
TEST_F(StagedRpcTest, WhatIsNotClippedIsAsInRelease) {
  for (const bool judged : {false, true}) {
    v1::RunSpec spec = StagedSpec(judged ? "judged" : "not-judged");
    if (judged) spec.set_max_grad_norm(1e6);
    Team team = StartTeam(spec, 1);
    for (uint64_t step = 1; step <= 2; ++step) {
      SendStep(&team, step, {});
      for (uint32_t i = 0; i < 3; ++i) team.reference->Update(i, step, GradientOf(team, i, step, 0, 0));
      const StepAnswer answer = ExpectApplied(&team);
      ASSERT_TRUE(answer.result);
      EXPECT_EQ(answer.result->grad_norm(), ExactNorm(team, step, 1, 1));
      EXPECT_EQ(answer.result->clip_coefficient(), 1);
    }
  }
}

TEST_F(StagedRpcTest, BitsDoNotDependOnWhatComesWhen) {
  std::optional<StepAnswer> first;
  for (const uint32_t shuffle : {1u, 2u, 3u}) {
    v1::RunSpec spec = StagedSpec("r" + std::to_string(shuffle));
    spec.set_max_grad_norm(0.1);
    Team team = StartTeam(spec, 3);
    SendStep(&team, 1, {.shuffle = shuffle});
    const auto scale = static_cast<float>(1.0 / 3);
    UpdateReference(&team, 1, 1, scale, static_cast<float>(0.1 / (ExactNorm(team, 1, 1, scale) + 1e-6)));
    const StepAnswer answer = ExpectApplied(&team);
    ASSERT_TRUE(answer.result);
    if (!first) first = answer;
    EXPECT_EQ(first->weights, answer.weights);
    EXPECT_EQ(first->result->SerializeAsString(), answer.result->SerializeAsString());
  }
}

// No weight, no moment and no t changes: the next step's bits are those of a first update.
TEST_F(StagedRpcTest, AnOverflowSkipsTheStepAndTheNextGoesOn) {
  v1::RunSpec spec = StagedSpec();
  spec.set_dynamic_loss_scale(true);
  spec.set_max_grad_norm(100);
  Team team = StartTeam(spec, 2);
  team.poisoned = {{1, 1}};
  SendStep(&team, 1, {.loss_scale = 65536});
  const v1::StepResult skipped = ExpectUntouched(&team, v1::STEP_OUTCOME_SKIPPED, "overflow");
  EXPECT_EQ(skipped.detail(),
            "tensor 1 'layers.0.w' has a gradient with NaN or infinities at loss_scale 65536; lower it");
  EXPECT_EQ(skipped.nonfinite_tensors(), 1u);
  SendStep(&team, 2, {.loss_scale = 32768});
  UpdateReference(&team, 2, 1, 0x1p-16f);
  ExpectApplied(&team);
  EXPECT_EQ(Status("r1").steps_skipped(), 1u);
  EXPECT_EQ(Status("r1").steps_applied(), 1u);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_steps_skipped_total{reason=\"overflow\",run_id=\"r1\"} 1"));
}

TEST_F(StagedRpcTest, ASkippedStepIsSkippedForAll) {
  v1::RunSpec spec = StagedSpec();
  spec.set_nonfinite(v1::NONFINITE_POLICY_SKIP_STEP);
  spec.set_accumulation(2);
  Team team = StartTeam(spec, 3);
  SendStep(&team, 1, {.micros = 2});
  UpdateReference(&team, 1, 2, static_cast<float>(1.0 / 3));
  ExpectApplied(&team);
  team.poisoned = {{2, 0}, {2, 2}};
  SendStep(&team, 2, {.micros = 2});
  EXPECT_THAT(ExpectUntouched(&team, v1::STEP_OUTCOME_SKIPPED, "nonfinite").detail(),
              HasSubstr("tensor 0 'embed.weight' and 1 more have"));
  SendStep(&team, 3, {.micros = 2});
  UpdateReference(&team, 3, 2, static_cast<float>(1.0 / 3));
  ExpectApplied(&team);
}

// The default: blocks without a finite gradient keep their contents, and are left out of the norm.
TEST_F(StagedRpcTest, SkippedTensorsAreLeftOutOfTheNorm) {
  v1::RunSpec spec = StagedSpec();
  spec.set_max_grad_norm(0.5);
  Team team = StartTeam(spec, 1);
  team.poisoned = {{1, 0}};
  SendStep(&team, 1, {});
  const double norm = ExactNorm(team, 1, 1, 1);
  EXPECT_TRUE(std::isfinite(norm));
  UpdateReference(&team, 1, 1, 1, static_cast<float>(0.5 / (norm + 1e-6)));
  const StepAnswer answer = ExpectApplied(&team);
  ASSERT_TRUE(answer.result);
  EXPECT_EQ(answer.result->grad_norm(), norm);
  EXPECT_EQ(answer.result->nonfinite_tensors(), 1u);
  EXPECT_EQ(answer.result->rejected_blocks(), 1u);
}

TEST_F(StagedRpcTest, StopAbortsTheStepAndNoLaterOneBegins) {
  v1::RunSpec spec = StagedSpec();
  spec.set_nonfinite(v1::NONFINITE_POLICY_STOP);
  Team team = StartTeam(spec, 2);
  team.poisoned = {{1, 2}};
  SendStep(&team, 1, {});
  const std::string why = ExpectUntouched(&team, v1::STEP_OUTCOME_ABORTED, "nonfinite").detail();
  EXPECT_THAT(why, HasSubstr("run 'r1' is stopped (nonfinite = stop) since step 1, in which tensor 2 'layers.0.b'"));
  for (const auto& wire : team.wires) {
    wire->Begin(2);
    const grpc::Status refused = wire->Finish();
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(refused.error_message(), why);
  }
  EXPECT_EQ(Status("r1").failure(), why);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_steps_aborted_total{reason=\"nonfinite\",run_id=\"r1\"} 1"));
}

TEST_F(StagedRpcTest, StopInReleaseUpdatesTheOtherTensors) {
  v1::RunSpec spec = SmallSpec();
  spec.set_nonfinite(v1::NONFINITE_POLICY_STOP);
  Team team = StartTeam(spec, 2);
  team.poisoned = {{1, 2}};
  SendStep(&team, 1, {});
  UpdateReference(&team, 1, 1, 0.5f);
  const StepAnswer answer = ExpectApplied(&team);
  ASSERT_TRUE(answer.result);
  EXPECT_THAT(answer.result->detail(), HasSubstr("'layers.0.b' has a gradient with NaN or infinities"));
  team.wires[0]->Begin(2);
  EXPECT_THAT(team.wires[0]->Finish().error_message(), HasSubstr("stopped (nonfinite = stop) since step 1"));
}

TEST_F(StagedRpcTest, ValuesAtTheEndWin) {
  Team team = StartTeam(StagedSpec(), 2);
  SendStep(&team, 1, {.end_lr = 0.25});
  for (uint32_t i = 0; i < 3; ++i) team.reference->UpdateBySum(i, 1, SumOf(team, i, 1, 1), 0.5f, 1, 0.25);
  ExpectApplied(&team);
  ExpectStep(&team, 2, 1, 0.5f);  // and are those of one step
}

TEST_F(StagedRpcTest, RanksThatEndWithOtherValuesHaveTheStepAborted) {
  Team team = StartTeam(StagedSpec(), 2);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    team.wires[rank]->Begin(1);
    for (uint32_t i = 0; i < 3; ++i) {
      for (const v1::Gradient& chunk : Chunks(team.spec, i, GradientOf(team, i, 1, rank, 0))) {
        team.wires[rank]->Chunk(chunk);
      }
    }
    team.wires[rank]->EndMicro(0);
    v1::TrainRequest end;
    end.mutable_step_end()->add_groups()->set_beta1(rank == 0 ? 0.8 : 0.75);
    team.wires[rank]->Send(end);
  }
  const std::string why = ExpectUntouched(&team, v1::STEP_OUTCOME_ABORTED, "disagreement").detail();
  for (const char* said :
       {"StepEnd of step 1", "rank 0 gives groups[0].beta1 = 0.8", "rank 1 gives groups[0].beta1 ="}) {
    EXPECT_THAT(why, HasSubstr(said));
  }
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_steps_aborted_total{reason=\"disagreement\",run_id=\"r1\"} 1"));
  SendStep(&team, 2, {});
  UpdateReference(&team, 2, 1, 0.5f);
  ExpectApplied(&team);
}

TEST_F(StagedRpcTest, ReleaseRefusesValuesAtTheEnd) {
  Team team = StartTeam(SmallSpec(), 1);
  SendStep(&team, 1, {.end_lr = 0.25});
  const grpc::Status refused = team.wires[0]->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(),
              HasSubstr("give those of groups with StepBegin, or create the run with commit = staged"));
}

TEST_F(StagedRpcTest, ALossScaleOfZeroIsRefused) {
  Team team = StartTeam(StagedSpec(), 1);
  SendStep(&team, 1, {.loss_scale = 0});
  const grpc::Status refused = team.wires[0]->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("loss_scale is 0"));
}

// A process that dies with some of its contribution summed: the step is aborted, and nothing of it is applied.
TEST_F(StagedRpcTest, ALostProcessAbortsTheStepWhole) {
  v1::RunSpec spec = StagedSpec();
  spec.set_max_grad_norm(0.5);
  Team team = StartTeam(spec, 2);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    team.wires[rank]->Begin(1);
    for (uint32_t i = 0; i < (rank == 0 ? 3u : 2u); ++i) {
      for (const v1::Gradient& chunk : Chunks(team.spec, i, GradientOf(team, i, 1, rank, 0))) {
        team.wires[rank]->Chunk(chunk);
      }
    }
  }
  team.wires[0]->EndStep();
  for (uint64_t returned = 0; returned < GradientBytes(team.spec.tensors[0]);) {  // until something is summed
    const auto answer = team.wires[1]->Read();
    ASSERT_TRUE(answer && answer->has_credit());
    returned += answer->credit().bytes();
  }
  const v1::AttachResponse again = AttachFresh("r1", /*takeover=*/true, 1, 2);
  EXPECT_EQ(again.resume_step(), 2u);
  EXPECT_EQ(again.last_result().outcome(), v1::STEP_OUTCOME_ABORTED);
  const StepAnswer aborted = ReadStep(team.wires[0].get());
  ASSERT_TRUE(aborted.result);
  EXPECT_EQ(aborted.result->outcome(), v1::STEP_OUTCOME_ABORTED);
  EXPECT_EQ(aborted.result->reason(), "restarted");
  EXPECT_TRUE(aborted.weights.empty());
  team.wires[1] = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(team.wires[1]->Open(again.session_token()));
  SendStep(&team, 2, {});
  UpdateReference(&team, 2, 1, 0.5f, static_cast<float>(std::min(1.0, 0.5 / (ExactNorm(team, 2, 1, 0.5f) + 1e-6))));
  ExpectApplied(&team);
}

}  // namespace
}  // namespace ballast::testing
