// Loss spikes, and what tells of them, as a trainer and a scraper hear of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "tests/server/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SpikesRpcTest : public RpcTest {
 protected:
  static constexpr uint64_t kCalm = 80;  // steps, past the warm-up and half a window

  static v1::RunSpec Spec(v1::CommitMode commit) {
    v1::RunSpec spec = MakeSpec("r1", {{"layers.0.w", {64, 64}, "fp32"}, {"layers.1.w", {32, 32}, "fp32"}});
    spec.set_commit(commit);
    (*spec.mutable_groups(0)->mutable_hyper())["beta2"] = 0.99;
    spec.mutable_spikes()->set_warmup_steps(20);
    return spec;
  }

  // A step whose gradients are the usual ones times a factor, of the second layer alone where `second` is given.
  v1::StepResult Send(Trainer* trainer, uint64_t step, float factor = 1, std::optional<double> loss = std::nullopt) {
    trainer->wire->Begin(step);
    std::vector<std::string> gradients;
    for (uint32_t i = 0; i < trainer->spec.tensors.size(); ++i) {
      std::string bytes = Gradient(trainer->spec, i, step);
      auto* const values = reinterpret_cast<float*>(bytes.data());
      for (size_t e = 0; e < bytes.size() / sizeof(float); ++e) values[e] *= i == 1 ? factor : 1;
      for (const v1::Gradient& chunk : Chunks(trainer->spec, i, bytes)) trainer->wire->Chunk(chunk);
      gradients.push_back(std::move(bytes));
    }
    trainer->wire->EndStep("", loss);
    const StepAnswer answer = ReadStep(trainer->wire.get());
    EXPECT_TRUE(answer.result) << trainer->wire->Finish().error_message();
    if (!answer.result || answer.result->outcome() != v1::STEP_OUTCOME_APPLIED) {
      EXPECT_THAT(answer.weights, IsEmpty());
      return answer.result.value_or(v1::StepResult());
    }
    // What it applied is what direct calls of the kernels make, and nothing else ever was.
    for (uint32_t i = 0; i < gradients.size(); ++i) {
      trainer->reference->Update(i, step, gradients[i]);
      EXPECT_TRUE(Equal(answer, *trainer->reference, i)) << "tensor " << i << ", step " << step;
    }
    return *answer.result;
  }
  Trainer StartCalm(const v1::RunSpec& spec) {
    StartServer();
    Trainer trainer = StartTrainer(spec);
    for (uint64_t step = 1; step <= kCalm; ++step) {
      const v1::StepResult result = Send(&trainer, step, 1, 2 + 0.01 * static_cast<double>(step % 3));
      EXPECT_THAT(result.spikes(), IsEmpty()) << "step " << step << ": " << result.ShortDebugString();
    }
    return trainer;
  }
  static std::vector<v1::SpikeKind> Kinds(const v1::StepResult& result) {
    std::vector<v1::SpikeKind> kinds;
    for (const v1::SpikeEvent& event : result.spikes()) kinds.push_back(event.kind());
    return kinds;
  }
  std::string Sample(const std::string& series) {
    for (const absl::string_view line : absl::StrSplit(metrics_.Serialize(), '\n')) {
      if (absl::StartsWith(line, absl::StrCat(series, " "))) return std::string(line.substr(series.size() + 1));
    }
    return "none";
  }
};

TEST_F(SpikesRpcTest, ASecondMomentThatLagsIsToldInTheStepsOwnResult) {
  Trainer trainer = StartCalm(Spec(v1::COMMIT_MODE_RELEASE));
  const v1::StepResult result = Send(&trainer, kCalm + 1, 30);
  EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_APPLIED);
  ASSERT_THAT(Kinds(result), ElementsAre(v1::SPIKE_KIND_RMS, v1::SPIKE_KIND_GRADIENT_NORM));
  const v1::SpikeEvent& event = result.spikes(0);
  EXPECT_EQ(event.layer(), "layers.1");
  EXPECT_EQ(event.tensor(), "layers.1.w");
  EXPECT_GE(event.value(), 2.3);
  EXPECT_EQ(event.threshold(), 2.3);
  ASSERT_EQ(result.warnings_size(), 2);
  EXPECT_THAT(result.warnings(0), HasSubstr("layers.1.w"));
  EXPECT_EQ(Sample("ballast_rms_spike_events_total{layer=\"layers.1\",run_id=\"r1\"}"), "1");
  EXPECT_EQ(Sample("ballast_rms_spike_events_total{layer=\"layers.0\",run_id=\"r1\"}"), "0");
  EXPECT_EQ(Sample("ballast_gradient_norm_outliers_total{run_id=\"r1\"}"), "1");
}

TEST_F(SpikesRpcTest, APredictionIsHeldAgainstTheLossThatFollows) {
  Trainer trainer = StartCalm(Spec(v1::COMMIT_MODE_RELEASE));
  Send(&trainer, kCalm + 1, 30, 2);
  Send(&trainer, kCalm + 2, 1, 2);
  EXPECT_THAT(Kinds(Send(&trainer, kCalm + 3, 1, 50)), ElementsAre(v1::SPIKE_KIND_LOSS));
  EXPECT_EQ(Sample("ballast_loss_spikes_total{run_id=\"r1\"}"), "1");
  EXPECT_EQ(Sample("ballast_predictor_hits_total{predictor=\"rms\",run_id=\"r1\"}"), "1");
  EXPECT_EQ(Sample("ballast_predictor_lead_steps_total{predictor=\"rms\",run_id=\"r1\"}"), "2");
  EXPECT_EQ(Sample("ballast_predictor_misses_total{predictor=\"curvature\",run_id=\"r1\"}"), "1");
}

TEST_F(SpikesRpcTest, ALossThatIsNotANumberIsASpike) {
  Trainer trainer = StartCalm(Spec(v1::COMMIT_MODE_RELEASE));
  EXPECT_THAT(Kinds(Send(&trainer, kCalm + 1, 1, std::numeric_limits<double>::quiet_NaN())),
              ElementsAre(v1::SPIKE_KIND_LOSS));
  EXPECT_EQ(Sample("ballast_loss_spikes_total{run_id=\"r1\"}"), "1");
}

TEST_F(SpikesRpcTest, AStagedRunSkipsTheStepBeforeItDoesHarm) {
  v1::RunSpec spec = Spec(v1::COMMIT_MODE_STAGED);
  spec.mutable_spikes()->set_action(v1::SPIKE_ACTION_SKIP);
  spec.mutable_spikes()->set_max_skips(2);
  Trainer trainer = StartCalm(spec);
  for (uint64_t step = kCalm + 1; step <= kCalm + 2; ++step) {
    const v1::StepResult skipped = Send(&trainer, step, 1000);
    EXPECT_EQ(skipped.outcome(), v1::STEP_OUTCOME_SKIPPED);
    EXPECT_EQ(skipped.reason(), "spike");
    EXPECT_THAT(skipped.detail(), HasSubstr("norm"));
    EXPECT_THAT(skipped.tensors_not_applied(), ElementsAre(0, 1));
  }
  const v1::StepResult applied = Send(&trainer, kCalm + 3, 1000);
  EXPECT_EQ(applied.outcome(), v1::STEP_OUTCOME_APPLIED) << "two in a row are the most";
  Send(&trainer, kCalm + 4);
  EXPECT_EQ(Sample("ballast_spike_actions_total{action=\"skip\",run_id=\"r1\"}"), "2");
  EXPECT_EQ(Sample("ballast_steps_skipped_total{reason=\"spike\",run_id=\"r1\"}"), "2");
}

}  // namespace
}  // namespace ballast::testing
