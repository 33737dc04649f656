#include "server/convert/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "tests/server/specs.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::SmallSpec;

struct Refusal {
  std::string name;
  std::function<void(v1::RunSpec&)> spoil;
  std::vector<std::string> says;  // field, got, wanted
};

const std::vector<Refusal>& RefusalsOfTheRun() {
  static const auto* const kRefusals = new std::vector<Refusal>{
      {"NoTensors", [](auto& s) { s.clear_tensors(); }, {"tensors is empty"}},
      {"TooManyTensors",
       [](auto& s) {
         for (int i = 0; i < 100; ++i) *s.add_tensors() = s.tensors(0);
       },
       {"103", "at most 50", "limits.tensors"}},
      {"NoGroups", [](auto& s) { s.clear_groups(); }, {"groups is empty"}},
      {"RunIdEmpty", [](auto& s) { s.clear_run_id(); }, {"run_id", "a-z"}},
      {"RunIdUpperCase", [](auto& s) { s.set_run_id("Run"); }, {"run_id", "'Run'"}},
      {"RunIdDashLast", [](auto& s) { s.set_run_id("r-"); }, {"run_id"}},
      {"RunIdPath", [](auto& s) { s.set_run_id("../x"); }, {"run_id"}},
      {"RunIdLong", [](auto& s) { s.set_run_id(std::string(64, 'a')); }, {"run_id", "63"}},
      {"NameEmpty", [](auto& s) { s.mutable_tensors(1)->clear_name(); }, {"tensors[1].name is empty"}},
      {"NameTwice", [](auto& s) { s.mutable_tensors(2)->set_name("embed.weight"); }, {"tensors[2]", "there twice"}},
      {"NameLong",
       [](auto& s) { s.mutable_tensors(1)->set_name(std::string(513, 'n')); },
       {"tensors[1].name", "513", "512"}},
      {"NameNotUtf8", [](auto& s) { s.mutable_tensors(1)->set_name("w\xff"); }, {"tensors[1].name", "UTF-8"}},
      {"ShapeNegative", [](auto& s) { s.mutable_tensors(0)->set_shape(0, -3); }, {"'embed.weight'", "-3"}},
      {"ShapeZero", [](auto& s) { s.mutable_tensors(0)->set_shape(1, 0); }, {"'embed.weight'", "leave the tensor out"}},
      {"ShapeOverflow",
       [](auto& s) {
         s.mutable_tensors(0)->set_shape(0, int64_t{1} << 32);
         s.mutable_tensors(0)->set_shape(1, int64_t{1} << 32);
       },
       {"'embed.weight'", "4294967296", "split"}},
      {"ShapeManyDimensions",
       [](auto& s) { s.mutable_tensors(0)->mutable_shape()->Resize(40, 1); },
       {"40 dimensions", "32"}},
      {"Dtype", [](auto& s) { s.mutable_tensors(0)->set_dtype("bfloat16"); }, {"'bfloat16'", "fp32, bf16, fp16"}},
      {"Group", [](auto& s) { s.mutable_tensors(0)->set_group(1); }, {"'embed.weight'", "group is 1", "1 groups"}},
      {"LrScale",
       [](auto& s) { s.mutable_tensors(0)->set_lr_scale(std::numeric_limits<double>::quiet_NaN()); },
       {"lr_scale", "nan"}},
      {"WdScale", [](auto& s) { s.mutable_tensors(0)->set_wd_scale(-1); }, {"wd_scale", "-1"}},
      {"Snapshots", [](auto& s) { s.mutable_rewind()->set_snapshots(17); }, {"rewind.snapshots is 17", "at most 16"}},
      {"SnapshotsOfNone", [](auto& s) { s.mutable_rewind()->set_every(5); }, {"rewind.every is 5", "set it to 1 or"}},
      {"Accumulation", [](auto& s) { s.set_accumulation(2000); }, {"accumulation is 2000", "1024"}},
      {"Ranks", [](auto& s) { s.set_ranks(65); }, {"ranks is 65", "64"}},
      {"Rewind",
       [](auto& s) { s.set_on_torn(v1::TORN_POLICY_REWIND); },
       {"on_torn = TORN_POLICY_REWIND", "rewind.snapshots is 0"}},
      {"RankTimeout", [](auto& s) { s.set_rank_timeout_s(-1); }, {"rank_timeout_s", "-1"}},
      {"StepTimeout", [](auto& s) { s.set_step_timeout_s(2e6); }, {"step_timeout_s", "2e+06"}},
      {"StepTimeoutBeforeALostRankIsLeftOut",
       [](auto& s) {
         s.set_on_lost_rank(v1::LOST_RANK_POLICY_CONTINUE);
         s.set_step_timeout_s(69);
       },
       {"step_timeout_s is 69", "rank_timeout_s, 70 s"}},
      {"UnknownEnum", [](auto& s) { s.set_reduction(static_cast<v1::Reduction>(77)); }, {"reduction"}},
  };
  return *kRefusals;
}

// What contradicts itself, by both names.
const std::vector<Refusal>& RefusalsOfPolicies() {
  const auto staged = [](auto change) {
    return [change](v1::RunSpec& s) {
      s.set_commit(v1::COMMIT_MODE_STAGED);
      change(s);
    };
  };
  static const auto* const kRefusals = new std::vector<Refusal>{
      {"ClippingInRelease",
       [](auto& s) { s.set_max_grad_norm(1.5); },
       {"max_grad_norm = 1.5 needs commit = COMMIT_MODE_STAGED", "commit is COMMIT_MODE_RELEASE"}},
      {"DynamicLossScaleInRelease",
       [](auto& s) { s.set_dynamic_loss_scale(true); },
       {"dynamic_loss_scale = true needs commit = COMMIT_MODE_STAGED"}},
      {"SkippedStepsInRelease",
       [](auto& s) { s.set_nonfinite(v1::NONFINITE_POLICY_SKIP_STEP); },
       {"nonfinite = NONFINITE_POLICY_SKIP_STEP needs commit", "NONFINITE_POLICY_STOP"}},
      {"ZeroNorm", staged([](auto& s) { s.set_max_grad_norm(0); }), {"max_grad_norm is 0", "above 0"}},
      {"NegativeNorm", staged([](auto& s) { s.set_max_grad_norm(-1); }), {"max_grad_norm is -1"}},
      {"InfiniteNorm",
       staged([](auto& s) { s.set_max_grad_norm(std::numeric_limits<double>::infinity()); }),
       {"max_grad_norm is inf", "finite"}},
      {"NanNorm",
       staged([](auto& s) { s.set_max_grad_norm(std::numeric_limits<double>::quiet_NaN()); }),
       {"max_grad_norm is nan"}},
      {"DynamicLossScaleThatSkipsTensors",
       staged([](auto& s) {
         s.set_dynamic_loss_scale(true);
         s.set_nonfinite(v1::NONFINITE_POLICY_SKIP_TENSOR);
       }),
       {"dynamic_loss_scale = true", "nonfinite = NONFINITE_POLICY_SKIP_TENSOR"}},
      {"DynamicLossScaleThatStops",
       staged([](auto& s) {
         s.set_dynamic_loss_scale(true);
         s.set_nonfinite(v1::NONFINITE_POLICY_STOP);
       }),
       {"dynamic_loss_scale = true", "nonfinite = NONFINITE_POLICY_STOP"}},
      {"UnknownPolicy",
       [](auto& s) { s.set_nonfinite(static_cast<v1::NonfinitePolicy>(9)); },
       {"nonfinite", "a value this version lacks"}},
  };
  return *kRefusals;
}

const std::vector<Refusal>& RefusalsOfAGroup() {
  static const auto* const kRefusals = new std::vector<Refusal>{
      {"Rule", [](auto& s) { s.mutable_groups(0)->set_rule("adamv"); }, {"groups[0].rule", "'adamv'", "adamw"}},
      {"Master", [](auto& s) { s.mutable_groups(0)->set_master("fp8"); }, {"groups[0].master", "split24"}},
      {"State", [](auto& s) { s.mutable_groups(0)->set_state("int8"); }, {"groups[0].state", "companded8"}},
      {"Rounding", [](auto& s) { s.mutable_groups(0)->set_rounding("up"); }, {"'up'", "stochastic, nearest"}},
      {"Serving", [](auto& s) { s.mutable_groups(0)->set_serving("int8"); }, {"'int8'", "fp32, bf16, fp16"}},
      {"HyperUnknown",
       [](auto& s) { (*s.mutable_groups(0)->mutable_hyper())["betas"] = 1; },
       {"groups[0].hyper", "'betas'", "beta1"}},
      {"HyperHigh",
       [](auto& s) { (*s.mutable_groups(0)->mutable_hyper())["beta1"] = 1; },
       {"hyper['beta1'] is 1", "below 1"}},
      {"HyperLow",
       [](auto& s) { (*s.mutable_groups(0)->mutable_hyper())["eps"] = 0; },
       {"hyper['eps'] is 0", "above 0"}},
      {"HyperNan",
       [](auto& s) { (*s.mutable_groups(0)->mutable_hyper())["lr"] = std::numeric_limits<double>::quiet_NaN(); },
       {"hyper['lr'] is nan"}},
      {"LrPeak", [](auto& s) { s.mutable_groups(0)->set_lr_peak(0); }, {"groups[0].lr_peak is 0", "above 0"}},
      {"LrPeakOfAnotherRule",
       [](auto& s) {
         s.mutable_groups(0)->set_rule("adam");
         s.mutable_groups(0)->set_lr_peak(1);
       },
       {"groups[0].lr_peak", "rule adam does not decouple", "unset"}},
      {"LrPeakTwice",
       [](auto& s) {
         s.mutable_groups(0)->set_lr_peak(1);
         (*s.mutable_groups(0)->mutable_hyper())["lr_peak"] = 1;
       },
       {"groups[0].lr_peak", "twice"}},
      {"MasterOfAnotherRule",
       [](auto& s) {
         s.mutable_groups(0)->set_rule("collage_plus");
         s.mutable_groups(0)->set_master("split24");
       },
       {"groups[0]: rule collage_plus is not built for master split24", "it needs master mcf"}},
      {"StateOfAnotherMaster",
       [](auto& s) {
         s.mutable_groups(0)->set_master("split32");
         s.mutable_groups(0)->set_state("flash8");
       },
       {"rule adamw with master split32 is not built for state flash8", "states fp32, bf16, companded8",
        "state flash8 with masters flash24, flash32, fp32, split24"}},
      {"StateOfAnotherRule",
       [](auto& s) {
         s.mutable_groups(0)->set_rule("lion");
         s.mutable_groups(0)->set_state("mcf");
       },
       {"rule lion is not built for state mcf", "it goes with states fp32, companded8"}},
      {"ServingOnlyForGradients",
       [](auto& s) { s.mutable_groups(0)->set_serving("fp8-e5m2"); },
       {"groups[0].serving", "'fp8-e5m2'", "fp8-e4m3, int8-row, int8-tensor"}},
      {"GradientOnlyForServing",
       [](auto& s) { s.mutable_groups(0)->set_gradient("int8-row"); },
       {"groups[0].gradient", "'int8-row'", "fp32, bf16, fp16, fp8-e5m2"}},
      {"DtypeThatCannotBeServed",
       [](auto& s) { s.mutable_tensors(0)->set_dtype("fp8-e5m2"); },
       {"'embed.weight'", "the group's serving, is 'fp8-e5m2'"}},
  };
  return *kRefusals;
}

class ConvertRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(ConvertRefusalTest, NamesFieldGotAndWanted) {
  v1::RunSpec spec = SmallSpec();
  GetParam().spoil(spec);
  Config::Limits limits;
  limits.tensors = 50;
  const auto made = ToRunSpec(spec, limits);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& piece : GetParam().says) {
    EXPECT_THAT(std::string(made.status().message()), HasSubstr(piece));
  }
}
INSTANTIATE_TEST_SUITE_P(Group, ConvertRefusalTest, ::testing::ValuesIn(RefusalsOfAGroup()),
                         [](const auto& row) { return row.param.name; });
INSTANTIATE_TEST_SUITE_P(Policies, ConvertRefusalTest, ::testing::ValuesIn(RefusalsOfPolicies()),
                         [](const auto& refusal) { return refusal.param.name; });
INSTANTIATE_TEST_SUITE_P(Spec, ConvertRefusalTest, ::testing::ValuesIn(RefusalsOfTheRun()),
                         [](const auto& row) { return row.param.name; });

TEST(ConvertTest, ANameThatSafetensorsReservesIsRefusedWhereItWouldBeWritten) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_tensors(1)->set_name("__metadata__");
  const absl::Status refused = ToRunSpec(spec, {}, /*has_storage=*/true).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::AllOf(HasSubstr("tensors[1].name is '__metadata__'"), HasSubstr("safetensors"),
                               HasSubstr("name it otherwise")));
  EXPECT_TRUE(ToRunSpec(spec, {}, /*has_storage=*/false).ok());
}

TEST(ConvertTest, FillsInDefaults) {
  const auto made = ToRunSpec(SmallSpec(), {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->tensors[0].elements, 30000u);
  EXPECT_STREQ(made->groups[0].master->name, "split24");
  EXPECT_STREQ(made->groups[0].kernel->state, "companded8");
  EXPECT_TRUE(made->groups[0].stochastic);
  EXPECT_EQ(made->stats_every, 10u);
  EXPECT_EQ(made->rank_timeout_s, 60);
  EXPECT_EQ(made->chunk_elements, (1u << 20) / 4);
  EXPECT_EQ(made->tensors[1].serving_format, kernels::FindWireFormat("fp32"));
  EXPECT_EQ(made->tensors[2].serving_format, kernels::FindWireFormat("bf16"));
}

TEST(ConvertTest, FormatsLeftOutAreThoseTheRuleHas) {
  for (const auto& [rule, master, state] : std::vector<std::array<std::string, 3>>{{"adamw", "split24", "companded8"},
                                                                                   {"lion", "split24", "companded8"},
                                                                                   {"collage_light", "mcf", "bf16"},
                                                                                   {"collage_plus", "mcf", "mcf"}}) {
    v1::RunSpec spec = SmallSpec();
    spec.mutable_groups(0)->set_rule(rule);
    const auto made = ToRunSpec(spec, {});
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->groups[0].kernel->master, master);
    EXPECT_EQ(made->groups[0].kernel->state, state);
  }
}

TEST(ConvertTest, RowsAreTheLastDimension) {
  v1::RunSpec spec = testing::MakeSpec("r1", {{"w", {6, 5, 4}}, {"b", {7}}, {"s", {}}, {"thin", {9, 1}}});
  const auto rows = [&](const char* serving) {
    spec.mutable_groups(0)->set_serving(serving);
    std::vector<uint64_t> lengths;
    const RunSpec made = ToRunSpec(spec, {}).value();
    for (const TensorSpec& t : made.tensors) lengths.push_back(t.row_length);
    return lengths;
  };
  EXPECT_EQ(rows("int8-row"), (std::vector<uint64_t>{4, 7, 1, 9}));
  EXPECT_EQ(rows("int8-tensor"), (std::vector<uint64_t>{120, 7, 1, 9}));
  EXPECT_EQ(rows("fp8-e4m3"), (std::vector<uint64_t>{0, 0, 0, 0}));
}

TEST(ConvertTest, GradientsMayHaveAFormatOfTheirOwn) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_gradient("fp8-e5m2");
  const auto made = ToRunSpec(spec, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->tensors[1].gradient_format, kernels::FindWireFormat("fp8-e5m2"));
  EXPECT_EQ(made->tensors[1].serving_format, kernels::FindWireFormat("fp32"));
  EXPECT_EQ(made->tensors[1].dtype, kernels::FindWireFormat("fp32"));
}

TEST(ConvertTest, LrPeakIsAHyperparameter) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_lr_peak(0.25);
  const auto made = ToRunSpec(spec, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->groups[0].hyper.back(), 0.25);
}

TEST(ConvertTest, EmptyShapeIsAScalar) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_tensors(0)->clear_shape();
  const auto made = ToRunSpec(spec, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->tensors[0].elements, 1u);
}

TEST(ConvertTest, AChunkOfTheWidestFormatFitsAMessage) {
  Config::Limits limits;
  limits.message_bytes = 1 << 20;
  limits.chunk_bytes = 4 << 20;
  const auto made = ToRunSpec(SmallSpec(), limits);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_LT(made->chunk_elements * 4, limits.message_bytes);
  EXPECT_EQ(made->chunk_elements % kernels::kTile, 0u);
}

TEST(ConvertTest, EveryTripleOfTheRegistryIsAccepted) {
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    v1::RunSpec spec = SmallSpec();
    spec.mutable_groups(0)->set_rule(kernel.rule);
    spec.mutable_groups(0)->set_master(kernel.master);
    spec.mutable_groups(0)->set_state(kernel.state);
    if (kernel.fit != nullptr) testing::KeepVectorsApart(&spec);
    const auto made = ToRunSpec(spec, {});
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->groups[0].kernel, &kernel);
  }
}

TEST(ConvertTest, StepBeginOverridesOnlyWhatItGives) {
  const auto spec = ToRunSpec(SmallSpec(), {});
  ASSERT_TRUE(spec.ok());
  v1::StepBegin begin;
  begin.set_step(3);
  begin.add_groups()->set_lr(0.25);
  const auto made = ToStepBegin(begin, *spec);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->hyper[0][0], 0.25);
  EXPECT_EQ(made->hyper[0][2], spec->groups[0].hyper[2]);
  EXPECT_EQ(made->loss_scale, 1);
}

TEST(ConvertTest, StepBeginRefusesByName) {
  const auto spec = ToRunSpec(SmallSpec(), {});
  ASSERT_TRUE(spec.ok());
  v1::StepBegin begin;
  begin.add_groups()->set_momentum(0.9);
  EXPECT_THAT(std::string(ToStepBegin(begin, *spec).status().message()), HasSubstr("groups[0].momentum"));
  begin.mutable_groups(0)->clear_momentum();
  begin.mutable_groups(0)->set_beta2(1.5);
  EXPECT_THAT(std::string(ToStepBegin(begin, *spec).status().message()), HasSubstr("beta2 is 1.5"));
  begin.mutable_groups(0)->clear_beta2();
  begin.mutable_groups(0)->set_lr(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(std::string(ToStepBegin(begin, *spec).status().message()), HasSubstr("groups[0].lr is nan"));
  begin.mutable_groups(0)->clear_lr();
  begin.add_groups();
  EXPECT_THAT(std::string(ToStepBegin(begin, *spec).status().message()), HasSubstr("2 groups"));
  begin.clear_groups();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {0.0, -1.0, 1e-300, 1e300, std::numeric_limits<double>::infinity(), nan}) {
    begin.set_loss_scale(bad);
    EXPECT_THAT(std::string(ToStepBegin(begin, *spec).status().message()), HasSubstr("loss_scale")) << bad;
  }
}

TEST(ConvertTest, StagedHasItsPolicies) {
  v1::RunSpec wire = SmallSpec();
  RunSpec made = ToRunSpec(wire, {}).value();
  EXPECT_FALSE(made.staged);
  EXPECT_FALSE(JudgesGradients(made));
  wire.set_nonfinite(v1::NONFINITE_POLICY_STOP);  // in release too
  EXPECT_EQ(ToRunSpec(wire, {}).value().nonfinite, Nonfinite::kStop);
  wire.set_commit(v1::COMMIT_MODE_STAGED);
  wire.set_max_grad_norm(0.5);
  made = ToRunSpec(wire, {}).value();
  EXPECT_TRUE(made.staged);
  EXPECT_EQ(made.max_grad_norm, 0.5);
  EXPECT_TRUE(JudgesGradients(made));
  wire.clear_nonfinite();
  EXPECT_EQ(ToRunSpec(wire, {}).value().nonfinite, Nonfinite::kSkipTensor);
  wire.set_dynamic_loss_scale(true);
  EXPECT_EQ(ToRunSpec(wire, {}).value().nonfinite, Nonfinite::kSkipStep);
  wire.clear_max_grad_norm();
  wire.clear_dynamic_loss_scale();
  EXPECT_FALSE(JudgesGradients(ToRunSpec(wire, {}).value()));
}

// The content has the values by name, so that ranks that disagree can be told which value differs.
TEST(ConvertTest, StepEndBringsValuesByPlaceAndName) {
  v1::RunSpec wire = SmallSpec();
  *wire.add_groups() = wire.groups(0);
  const RunSpec spec = ToRunSpec(wire, {}).value();
  v1::StepEnd end;
  EXPECT_EQ(ToStepEnd(&end, spec).value().content, "");
  end.add_groups();
  end.add_groups()->set_beta2(0.5);
  const auto made = ToStepEnd(&end, spec);
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_EQ(made->values.size(), 1u);
  EXPECT_EQ(made->values[0].group, 1u);
  EXPECT_STREQ(spec.groups[1].kernel->hypers[made->values[0].hyper].name, "beta2");
  EXPECT_EQ(made->values[0].value, 0.5);
  EXPECT_EQ(made->content, "groups[1].beta2 = 0.5\n");
  end.mutable_groups(1)->set_beta2(2);
  EXPECT_THAT(std::string(ToStepEnd(&end, spec).status().message()), HasSubstr("StepEnd, groups[1].beta2 is 2"));
  end.add_groups();
  EXPECT_THAT(std::string(ToStepEnd(&end, spec).status().message()), HasSubstr("StepEnd has values of 3 groups"));
}

TEST(ConvertTest, ABitPastTheLastTensorIsRefused) {
  EXPECT_EQ(*ToBits("\x09", 4, "bits"), (std::vector<bool>{true, false, false, true}));
  EXPECT_EQ(*ToBits("", 4, "bits"), std::vector<bool>(4));
  EXPECT_EQ(ToBits("\x10", 4, "bits").status().message(), "bits has bit 4 set, but the run has 4 tensors");
}

}  // namespace
}  // namespace ballast
