// Loss spikes, and what tells of them, as a trainer and a scraper hear of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "tests/server/rpc/rpc_fixture.h"

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
    spec.mutable_spikes()->set_rms_min_elements(1024);
    spec.mutable_spikes()->set_rms_margin(2);  // so that the threshold is the limit, RMS_t being about 1
    return spec;
  }

  // A step whose gradients are the usual ones, those of the second tensor times a factor.
  v1::StepResult Send(Trainer* trainer, uint64_t step, float factor = 1, std::optional<double> loss = std::nullopt) {
    const std::vector<std::string> gradients = SendOnly(trainer, step, factor, loss);
    const StepAnswer answer = ReadStep(trainer->wire.get());
    EXPECT_TRUE(answer.result) << trainer->wire->Finish().error_message();
    if (!answer.result || answer.result->outcome() != v1::STEP_OUTCOME_APPLIED) {
      EXPECT_THAT(answer.weights, IsEmpty());
      return answer.result.value_or(v1::StepResult());
    }
    // What it applied is what direct calls of the kernels make, and nothing else ever was.
    for (uint32_t i = 0; i < gradients.size(); ++i) {
      trainer->reference->UpdateBySum(i, step, Floats(gradients[i]), 1, ClipOf(i, gradients[i]));
      EXPECT_TRUE(Equal(answer, *trainer->reference, i)) << "tensor " << i << ", step " << step;
    }
    return *answer.result;
  }
  static std::vector<std::string> SendOnly(Trainer* trainer, uint64_t step, float factor, std::optional<double> loss) {
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
    return gradients;
  }
  static std::vector<float> Floats(const std::string& bytes) {
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  // 1 without a clip.
  float ClipOf(uint32_t tensor, const std::string& gradient) {
    if (!clip_) return 1;
    const auto measure = kernels::WireFormats()[static_cast<size_t>(kernels::FindWireFormat("fp32"))].measure;
    const std::vector<float> values = Floats(gradient);
    std::vector<kernels::TileStatistics> tiles((values.size() + kernels::kTile - 1) / kernels::kTile);
    measure(values.data(), values.size(), 1, 0, tiles.size(), tiles.data());
    return clip_->Next(tensor, std::sqrt(kernels::Combine(tiles, false).grad_sq));
  }
  v1::GetHistoryResponse History() {
    grpc::ClientContext context;
    v1::GetHistoryRequest request;
    request.set_run_id("r1");
    v1::GetHistoryResponse response;
    EXPECT_TRUE(admin_->GetHistory(&context, request, &response).ok());
    return response;
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
  // After so many calm steps.
  static std::unique_ptr<Reference> Replayed(const RunSpec& spec, uint64_t steps) {
    auto reference = std::make_unique<Reference>(spec);
    for (uint32_t i = 0; i < spec.tensors.size(); ++i) reference->Load(i, Weights(spec, i));
    for (uint64_t step = 1; step <= steps; ++step) {
      for (uint32_t i = 0; i < spec.tensors.size(); ++i) reference->Update(i, step, Gradient(spec, i, step));
    }
    return reference;
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

  std::optional<TensorClip> clip_;  // that the run has, too
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
  ASSERT_EQ(result.warnings_size(), 1) << "of the norm nobody is warned";
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
    EXPECT_THAT(skipped.detail(), HasSubstr("RMS_t"));
    EXPECT_THAT(skipped.tensors_not_applied(), ElementsAre(0, 1));
  }
  const v1::StepResult applied = Send(&trainer, kCalm + 3, 1000);
  EXPECT_EQ(applied.outcome(), v1::STEP_OUTCOME_APPLIED) << "two in a row are the most";
  Send(&trainer, kCalm + 4);
  EXPECT_EQ(Sample("ballast_spike_actions_total{action=\"skip\",run_id=\"r1\"}"), "2");
  EXPECT_EQ(Sample("ballast_steps_skipped_total{reason=\"spike\",run_id=\"r1\"}"), "2");
}

TEST_F(SpikesRpcTest, ARunGoesBackWhenItsLossSpikesAndStopsWhenThatDoesNotHelp) {
  v1::RunSpec spec = Spec(v1::COMMIT_MODE_RELEASE);
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(10);
  spec.mutable_spikes()->set_action(v1::SPIKE_ACTION_REWIND);
  spec.mutable_spikes()->set_rewind_steps(5);
  spec.mutable_spikes()->set_max_rewinds(1);
  Trainer trainer = StartCalm(spec);  // snapshots of steps 70 and 80
  Send(&trainer, kCalm + 1, 1, 2);
  // Its result may come before the stream ends, or not.
  SendOnly(&trainer, kCalm + 2, 1, 50);
  ReadStep(trainer.wire.get());
  const grpc::Status rewound = trainer.wire->Finish();
  EXPECT_EQ(rewound.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(rewound.error_message(), HasSubstr("rewound to step 70"));
  trainer.token = AttachFresh("r1").session_token();  // once the rewind is done, which sessions hear of first
  EXPECT_EQ(Sample("ballast_loss_spikes_total{run_id=\"r1\"}"), "1");
  EXPECT_EQ(Status("r1").step(), 70u);
  EXPECT_EQ(Sample("ballast_spike_actions_total{action=\"rewind\",run_id=\"r1\"}"), "1");
  EXPECT_EQ(Sample("ballast_rewinds_total{reason=\"spike\",run_id=\"r1\"}"), "1");
  trainer.wire = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(trainer.wire->Open(trainer.token));
  trainer.reference = Replayed(trainer.spec, 70);  // the bits of one that never left that step
  Send(&trainer, 71, 1, 2);
  EXPECT_THAT(Kinds(Send(&trainer, 72, 1, 50)), ElementsAre(v1::SPIKE_KIND_LOSS)) << "it has forgotten the first one";
  trainer.wire->Begin(73);
  const grpc::Status stopped = trainer.wire->Finish();
  EXPECT_EQ(stopped.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(stopped.error_message(), HasSubstr("after 1 rewinds (spikes.max_rewinds)"));
  EXPECT_EQ(Sample("ballast_spike_actions_total{action=\"stop\",run_id=\"r1\"}"), "1");
}

class SpikesByCommitRpcTest : public SpikesRpcTest, public ::testing::WithParamInterface<v1::CommitMode> {};
INSTANTIATE_TEST_SUITE_P(Commit, SpikesByCommitRpcTest,
                         ::testing::Values(v1::COMMIT_MODE_RELEASE, v1::COMMIT_MODE_STAGED),
                         [](const auto& commit) { return v1::CommitMode_Name(commit.param); });

TEST_P(SpikesByCommitRpcTest, CurvatureIsMeasuredAndChangesNoBit) {
  v1::RunSpec spec = Spec(GetParam());
  spec.mutable_spikes()->set_curvature(true);
  if (GetParam() == v1::COMMIT_MODE_STAGED) spec.mutable_spikes()->set_action(v1::SPIKE_ACTION_SKIP);
  spec.mutable_spikes()->set_warmup_steps(1000);  // noise has no curvature to speak of
  const Trainer trainer = StartCalm(spec);
  const v1::GetHistoryResponse history = History();
  ASSERT_EQ(history.steps_size(), static_cast<int>(kCalm));
  EXPECT_FALSE(history.steps(0).has_curvature_ratio()) << "no update went before";
  for (int i = 1; i < history.steps_size(); ++i)
    EXPECT_TRUE(history.steps(i).has_curvature_ratio()) << "step " << i + 1;
  EXPECT_NE(Sample("ballast_curvature_ratio{run_id=\"r1\"}"), "none");
  EXPECT_EQ(Status("r1").bytes().SerializeAsString(), Status("r1").plan().server().SerializeAsString());
}

TEST_P(SpikesByCommitRpcTest, ATensorIsHeldToItsOwnUsualNorm) {
  v1::RunSpec spec = Spec(GetParam());
  spec.mutable_tensor_clip()->set_absolute(0.3);
  spec.mutable_tensor_clip()->set_warmup_steps(10);
  if (GetParam() == v1::COMMIT_MODE_STAGED) spec.set_nonfinite(v1::NONFINITE_POLICY_SKIP_STEP);
  clip_.emplace(TensorClip::Options{.absolute = 0.3, .warmup = 10}, 2);
  Trainer trainer = StartCalm(spec);
  EXPECT_EQ(Send(&trainer, kCalm + 1, 1000).outcome(), v1::STEP_OUTCOME_APPLIED);
  EXPECT_NE(Sample("ballast_update_clipped_total{run_id=\"r1\"}"), "0");
}

TEST_F(SpikesRpcTest, TheHistoryTellsStepsLayersAndTensors) {
  Trainer trainer = StartCalm(Spec(v1::COMMIT_MODE_RELEASE));
  Send(&trainer, kCalm + 1, 30, 2);
  const v1::GetHistoryResponse history = History();
  EXPECT_THAT(history.layers(), ElementsAre("layers.0", "layers.1"));
  const v1::StepRecord& last = *history.steps().rbegin();
  EXPECT_EQ(last.step(), kCalm + 1);
  EXPECT_EQ(last.loss(), 2);
  EXPECT_EQ(last.layer_rms_size(), 2);
  EXPECT_GE(last.layer_rms(1), 2.3f);
  EXPECT_EQ(last.received_bytes(), 4u * (64 * 64 + 32 * 32));
  ASSERT_EQ(last.spikes_size(), 2);
  EXPECT_THAT(last.spikes(0).text(), HasSubstr("layers.1.w"));
  ASSERT_EQ(history.tensors_size(), 2);
  EXPECT_EQ(history.tensors(0).tensor(), "layers.1.w") << "the first to look at";
}

}  // namespace
}  // namespace ballast::testing
