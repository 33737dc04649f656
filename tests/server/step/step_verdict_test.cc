#include "server/step/step_verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

RunSpec SpecWith(Nonfinite policy, bool staged = true) {
  RunSpec spec{.run_id = "r1"};
  spec.tensors = {{.name = "a"}, {.name = "b"}, {.name = "c"}};
  spec.staged = staged;
  spec.nonfinite = policy;
  return spec;
}
const GradientFindings kFinite{.norm = 3},
    kOneBad{.norm = 3, .nonfinite_tensors = 1, .first_nonfinite = 2, .first_name = "c"},
    kTwoBad{.norm = 3, .nonfinite_tensors = 2, .first_nonfinite = 1, .first_name = "b"}, kTooLarge{.norm = kInfinity};

// As torch's clip_grad_norm_.
TEST(StepVerdictTest, TheCoefficientBringsTheNormToItsLimit) {
  EXPECT_EQ(ClipCoefficient(std::nullopt, 5), 1.0f);
  EXPECT_EQ(ClipCoefficient(2, 1), 1.0f);
  EXPECT_EQ(ClipCoefficient(2, 0), 1.0f);
  EXPECT_EQ(ClipCoefficient(2, 2), static_cast<float>(2 / (2 + 1e-6)));
  EXPECT_EQ(ClipCoefficient(2, 5), static_cast<float>(2 / (5 + 1e-6)));
  EXPECT_EQ(ClipCoefficient(2, kInfinity), 0.0f);
}

TEST(StepVerdictTest, FiniteGradientsAreAppliedUnderEveryPolicy) {
  for (const Nonfinite policy : {Nonfinite::kSkipTensor, Nonfinite::kSkipStep, Nonfinite::kStop}) {
    const event::Verdict verdict = JudgeStep(SpecWith(policy), 7, 1, kFinite);
    EXPECT_EQ(verdict.outcome, Outcome::kApplied);
    EXPECT_EQ(verdict.step, 7u);
    EXPECT_EQ(StopReason(SpecWith(policy), 7, kFinite), "");
  }
}

TEST(StepVerdictTest, SkippedTensorsDoNotSkipTheStep) {
  for (const GradientFindings& found : {kOneBad, kTooLarge}) {
    EXPECT_EQ(JudgeStep(SpecWith(Nonfinite::kSkipTensor), 1, 1, found).outcome, Outcome::kApplied);
  }
}

TEST(StepVerdictTest, ASkippedStepNamesATensor) {
  const event::Verdict one = JudgeStep(SpecWith(Nonfinite::kSkipStep), 1, 1, kOneBad);
  EXPECT_EQ(one.outcome, Outcome::kSkipped);
  EXPECT_EQ(one.reason, "nonfinite");
  EXPECT_EQ(one.detail, "tensor 2 'c' has a gradient with NaN or infinities");
  EXPECT_EQ(JudgeStep(SpecWith(Nonfinite::kSkipStep), 1, 1, kTwoBad).detail,
            "tensor 1 'b' and 1 more have a gradient with NaN or infinities");
  const event::Verdict large = JudgeStep(SpecWith(Nonfinite::kSkipStep), 1, 1, kTooLarge);
  EXPECT_EQ(large.outcome, Outcome::kSkipped);
  EXPECT_THAT(large.detail, HasSubstr("the norm over all gradients is too large"));
}

TEST(StepVerdictTest, UnderADynamicLossScaleANonFiniteGradientIsAnOverflow) {
  RunSpec spec = SpecWith(Nonfinite::kSkipStep);
  spec.dynamic_loss_scale = true;
  const event::Verdict verdict = JudgeStep(spec, 1, 65536, kOneBad);
  EXPECT_EQ(verdict.outcome, Outcome::kSkipped);
  EXPECT_EQ(verdict.reason, "overflow");
  EXPECT_THAT(verdict.detail, HasSubstr("at loss_scale 65536; lower it"));
}

TEST(StepVerdictTest, AStoppedRunNamesTensorStepAndFix) {
  const event::Verdict verdict = JudgeStep(SpecWith(Nonfinite::kStop), 12, 1, kOneBad);
  EXPECT_EQ(verdict.outcome, Outcome::kAborted);
  EXPECT_EQ(verdict.reason, "nonfinite");
  for (const char* word : {"'r1' is stopped", "nonfinite = stop", "since step 12", "tensor 2 'c'", "take the run back",
                           "delete the run"}) {
    EXPECT_THAT(verdict.detail, HasSubstr(word));
  }
  EXPECT_EQ(StopReason(SpecWith(Nonfinite::kStop, /*staged=*/false), 12, kOneBad), verdict.detail);
  EXPECT_EQ(StopReason(SpecWith(Nonfinite::kSkipTensor), 12, kOneBad), "");
}

}  // namespace
}  // namespace ballast
