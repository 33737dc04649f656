// What a run takes for a loss spike, from the wire.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "server/convert/convert.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MakeSpec;
using testing::SmallSpec;

v1::LayerThreshold Threshold(const std::string& layer, double rms) {
  v1::LayerThreshold threshold;
  threshold.set_layer(layer);
  threshold.set_rms_threshold(rms);
  return threshold;
}

struct SpikesRefusal {
  std::string name;
  std::function<void(v1::RunSpec&)> spoil;
  std::vector<std::string> says;  // field, got, wanted
};

const std::vector<SpikesRefusal>& RefusalsOfRms() {
  static const auto* const kRefusals = new std::vector<SpikesRefusal>{
      {"Threshold", [](auto& s) { s.mutable_spikes()->set_rms_threshold(-1); }, {"spikes.rms_threshold", "-1"}},
      {"ThresholdOutOfReach",
       [](auto& s) {
         (*s.mutable_groups(0)->mutable_hyper())["beta2"] = 0.8;
         s.mutable_spikes()->set_rms_threshold(2.3);
       },
       {"spikes.rms_threshold", "2.23", "beta2"}},
      {"ThresholdOfNoSecondMoment",
       [](auto& s) {
         s.mutable_groups(0)->set_rule("sgd");
         s.mutable_spikes()->set_rms_threshold(2.3);
       },
       {"second moment", "leave the threshold unset"}},
      {"ThresholdOfSmallTensors",
       [](auto& s) {
         s.mutable_spikes()->set_rms_min_elements(1 << 30);
         s.mutable_spikes()->set_rms_threshold(2.3);
       },
       {"spikes.rms_threshold", "spikes.rms_min_elements = 1073741824 elements; lower that"}},
      {"NoTensorOfSoManyElements",
       [](auto& s) { s.mutable_spikes()->set_rms_min_elements(1ull << 60); },
       {"spikes.rms_min_elements is 1152921504606846976, and no tensor has so many", "lower it"}},
      {"MarginOutOfReach",
       [](auto& s) {
         s.mutable_spikes()->set_rms_margin(40);
         s.mutable_spikes()->set_rms_min_elements(1);
       },
       {"spikes.rms_margin is 40", "at most", "31.6"}},
      {"MarginUnderOne", [](auto& s) { s.mutable_spikes()->set_rms_margin(0.9); }, {"spikes.rms_margin is 0.9"}},
      {"NoElements", [](auto& s) { s.mutable_spikes()->set_rms_min_elements(0); }, {"spikes.rms_min_elements is 0"}},
      {"LayerNotARegex",
       [](auto& s) { *s.mutable_spikes()->add_layers() = Threshold("layers.(", 3); },
       {"spikes.layers[0]", "'layers.('", "RE2"}},
      {"LayersTooMany",
       [](auto& s) {
         for (int i = 0; i < 400000; ++i) *s.mutable_spikes()->add_layers() = Threshold("embed", 3);
       },
       {"spikes.layers has 400000 entries", "at most 1024"}},
      {"LayerTooLong",
       [](auto& s) { *s.mutable_spikes()->add_layers() = Threshold("embed" + std::string(252, '?'), 3); },
       {"spikes.layers[0].layer has 257 bytes", "at most 256"}},
      {"LayerTooLargeAProgram",
       [](auto& s) { *s.mutable_spikes()->add_layers() = Threshold("embed(\\pL{9}){0,90}", 3); },
       {"spikes.layers[0]", "too large"}},
      {"LayersTooLargeProgramsTogether",
       [](auto& s) {
         for (int i = 0; i < 1024; ++i) *s.mutable_spikes()->add_layers() = Threshold("embed(abcde){0,50}", 3);
       },
       {"one too many", "at most 32768"}},
      {"LayerMatchesNothing",
       [](auto& s) { *s.mutable_spikes()->add_layers() = Threshold("layer", 3); },
       {"spikes.layers[0]", "'layer'", "embed, layers.0"}},
      {"LayerOutOfReach",
       [](auto& s) { *s.mutable_spikes()->add_layers() = Threshold("embed", 99); },
       {"spikes.layers[0].rms_threshold", "99", "31.6"}},
  };
  return *kRefusals;
}

const std::vector<SpikesRefusal>& RefusalsOfActions() {
  static const auto* const kRefusals = new std::vector<SpikesRefusal>{
      {"Sigmas", [](auto& s) { s.mutable_spikes()->set_loss_sigmas(0); }, {"spikes.loss_sigmas", "above 0"}},
      {"Skips", [](auto& s) { s.mutable_spikes()->set_max_skips(0); }, {"spikes.max_skips", "1 to"}},
      {"SkipInRelease",
       [](auto& s) { s.mutable_spikes()->set_action(v1::SPIKE_ACTION_SKIP); },
       {"SPIKE_ACTION_SKIP", "COMMIT_MODE_STAGED", "COMMIT_MODE_RELEASE"}},
      {"TwoKindsOfClipping",
       [](auto& s) {
         s.set_commit(v1::COMMIT_MODE_STAGED);
         s.set_max_grad_norm(1);
         s.mutable_tensor_clip();
       },
       {"tensor_clip", "max_grad_norm", "leave one of them out"}},
      {"TensorClip", [](auto& s) { s.mutable_tensor_clip()->set_beta(1); }, {"tensor_clip.beta is 1", "below 1"}},
      {"RewindWithoutSnapshots",
       [](auto& s) { s.mutable_spikes()->set_action(v1::SPIKE_ACTION_REWIND); },
       {"SPIKE_ACTION_REWIND", "rewind.snapshots"}},
      {"ActOnWithoutAnAction",
       [](auto& s) { s.mutable_spikes()->add_act_on(v1::SPIKE_KIND_RMS); },
       {"spikes.act_on", "SPIKE_ACTION_WARN"}},
      {"ActOnCurvatureThatIsNotMeasured",
       [](auto& s) {
         s.set_commit(v1::COMMIT_MODE_STAGED);
         s.mutable_spikes()->set_action(v1::SPIKE_ACTION_SKIP);
         s.mutable_spikes()->add_act_on(v1::SPIKE_KIND_CURVATURE);
       },
       {"SPIKE_KIND_CURVATURE", "spikes.curvature"}},
  };
  return *kRefusals;
}

class SpikesRefusalTest : public ::testing::TestWithParam<SpikesRefusal> {};

TEST_P(SpikesRefusalTest, NamesTheFieldWhatItIsAndTheFix) {
  v1::RunSpec spec = SmallSpec();
  GetParam().spoil(spec);
  const auto made = ToRunSpec(spec, {});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& piece : GetParam().says) {
    EXPECT_THAT(std::string(made.status().message()), HasSubstr(piece));
  }
}
INSTANTIATE_TEST_SUITE_P(Rms, SpikesRefusalTest, ::testing::ValuesIn(RefusalsOfRms()),
                         [](const auto& refusal) { return refusal.param.name; });
INSTANTIATE_TEST_SUITE_P(Actions, SpikesRefusalTest, ::testing::ValuesIn(RefusalsOfActions()),
                         [](const auto& refusal) { return refusal.param.name; });

TEST(ConvertSpikesTest, TheFirstPatternThatMatchesALayerHolds) {
  v1::RunSpec spec = SmallSpec();
  *spec.mutable_spikes()->add_layers() = Threshold("layers\\.[0-9]+", 5);
  *spec.mutable_spikes()->add_layers() = Threshold(".*", 4);
  const auto made = ToRunSpec(spec, {});
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_EQ(made->layers.size(), 2u);
  EXPECT_EQ(made->layers[0].name, "embed");
  EXPECT_EQ(made->layers[0].rms_threshold, 4);
  EXPECT_EQ(made->layers[1].name, "layers.0");
  EXPECT_EQ(made->layers[1].rms_threshold, 5);
}

std::vector<bool> Watched(const v1::RunSpec& spec) {
  const auto made = ToRunSpec(spec, {});
  EXPECT_TRUE(made.ok()) << made.status();
  std::vector<bool> watched;
  for (const TensorSpec& t : made->tensors) watched.push_back(WatchesRms(*made, t));
  return watched;
}

// As specs on disks have it, which are older than the least size.
TEST(ConvertSpikesTest, AThresholdForSmallTensorsAloneHasThemWatched) {
  v1::RunSpec spec =
      MakeSpec("r", {{"embed", {64, 64}, "fp32"}, {"layers.0.w", {4, 4}, "fp32"}, {"layers.0.b", {4}, "fp32"}});
  EXPECT_THAT(Watched(spec), ElementsAre(true, false, false));
  spec.mutable_spikes()->set_rms_threshold(3);
  EXPECT_THAT(Watched(spec), ElementsAre(true, false, false)) << "it is for embed as well";
  *spec.mutable_spikes()->add_layers() = Threshold("layers.0", 3);
  EXPECT_THAT(Watched(spec), ElementsAre(true, true, true));
  spec.mutable_spikes()->set_rms_min_elements(16);
  EXPECT_THAT(Watched(spec), ElementsAre(true, true, false)) << "it was said how small";
  spec.mutable_spikes()->set_rms_min_elements(17);
  EXPECT_FALSE(ToRunSpec(spec, {}).ok());
}

// Nobody asked for it: such a run has no RMS events.
TEST(ConvertSpikesTest, TheDefaultMayBeOutOfReach) {
  v1::RunSpec spec = SmallSpec();
  (*spec.mutable_groups(0)->mutable_hyper())["beta2"] = 0.5;
  EXPECT_TRUE(ToRunSpec(spec, {}).ok());
}

TEST(ConvertSpikesTest, AnActionAnswersItsUsualKindsUnlessTold) {
  v1::RunSpec spec = SmallSpec();
  spec.set_commit(v1::COMMIT_MODE_STAGED);
  spec.mutable_spikes()->set_action(v1::SPIKE_ACTION_SKIP);
  const SpikeSettings usual = ToRunSpec(spec, {})->spikes;
  EXPECT_TRUE(usual.acts_on[static_cast<size_t>(SpikeKind::kRms)]);
  EXPECT_TRUE(usual.acts_on[static_cast<size_t>(SpikeKind::kGradientNorm)]);
  EXPECT_FALSE(usual.acts_on[static_cast<size_t>(SpikeKind::kLoss)]);
  spec.mutable_spikes()->add_act_on(v1::SPIKE_KIND_LOSS);
  const SpikeSettings told = ToRunSpec(spec, {})->spikes;
  EXPECT_FALSE(told.acts_on[static_cast<size_t>(SpikeKind::kRms)]);
  EXPECT_TRUE(told.acts_on[static_cast<size_t>(SpikeKind::kLoss)]);
}

}  // namespace
}  // namespace ballast
