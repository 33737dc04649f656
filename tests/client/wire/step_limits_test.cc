// What a trainer may say of a step, by the run's spec.
#include "client/cpp/wire/step_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

// Two groups, as a daemon has filled them in.
v1::RunSpec SpecOf(v1::CommitMode commit) {
  v1::RunSpec spec;
  spec.set_run_id("r");
  spec.set_accumulation(4);
  spec.set_commit(commit);
  for (const char* rule : {"adamw", "sgd"}) {
    v1::GroupSpec* group = spec.add_groups();
    group->set_rule(rule);
    (*group->mutable_hyper())["lr"] = 1e-3;
    (*group->mutable_hyper())["weight_decay"] = 0;
  }
  for (const char* name : {"beta1", "beta2"}) (*spec.mutable_groups(0)->mutable_hyper())[name] = 0.9;
  (*spec.mutable_groups(1)->mutable_hyper())["momentum"] = 0;
  return spec;
}

StepLimits Staged() { return StepLimits(SpecOf(v1::COMMIT_MODE_STAGED)); }

void ExpectInvalid(const absl::Status& status, const std::string& what) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(what));
}

TEST(StepLimitsTest, ValuesOnTheirBoundsAreTaken) {
  const GroupValues least{.lr = 0, .weight_decay = 0, .beta1 = 0, .beta2 = 0};
  const GroupValues most{.lr = 1e6, .weight_decay = 1e6, .momentum = std::nextafter(1, 0)};
  for (const double scale : {1e-38, 1.0, 3e38}) {
    EXPECT_TRUE(Staged().CheckBegin({.groups = {least, most}, .loss_scale = scale, .micro_batches = 4}).ok()) << scale;
  }
  EXPECT_TRUE(Staged().CheckBegin({.micro_batches = 0}).ok());
  EXPECT_TRUE(
      Staged()
          .CheckEnd({.groups = {least, most}, .max_grad_norm = 1e-300, .gradient_flushed = 0, .gradient_overflowed = 1})
          .ok());
}

TEST(StepLimitsTest, ValuesBeyondThemAreNamed) {
  for (const double rate : {kNan, kInfinity, -1e-9, 1.1e6}) {
    ExpectInvalid(Staged().CheckBegin({.groups = {{}, {.lr = rate}}}), "BeginStep: groups[1].lr is ");
    ExpectInvalid(Staged().CheckEnd({.groups = {{.weight_decay = rate}}}), "EndStep: groups[0].weight_decay is ");
  }
  for (const double decay : {kNan, -0.1, 1.0}) {
    ExpectInvalid(Staged().CheckBegin({.groups = {{.beta1 = decay}}}), "groups[0].beta1 is ");
    ExpectInvalid(Staged().CheckBegin({.groups = {{.beta2 = decay}}}), "wanted at least 0 and below 1");
    ExpectInvalid(Staged().CheckBegin({.groups = {{}, {.momentum = decay}}}), "groups[1].momentum is ");
  }
  for (const double scale : {0.0, -1.0, kNan, kInfinity, 1e-50}) {
    ExpectInvalid(Staged().CheckBegin({.loss_scale = scale}), "loss_scale is ");
  }
  for (const double share : {kNan, -0.1, 1.1}) {
    ExpectInvalid(Staged().CheckEnd({.gradient_flushed = share}), "gradient_flushed is ");
    ExpectInvalid(Staged().CheckEnd({.gradient_overflowed = share}), "gradient_overflowed is ");
  }
}

TEST(StepLimitsTest, AValueThatTheRuleLacksIsNamedWithThoseThatItHas) {
  ExpectInvalid(Staged().CheckBegin({.groups = {{.momentum = 0.9}}}),
                "groups[0].momentum is given, but its rule adamw has only beta1, beta2, lr, weight_decay");
  v1::RunSpec bare;  // of a daemon that has filled nothing in
  bare.add_groups()->set_rule("adamw");
  EXPECT_TRUE(StepLimits(bare).CheckBegin({.groups = {{.momentum = 0.9}}}).ok());
}

TEST(StepLimitsTest, MicroBatchesAreAtMostThoseOfTheRun) {
  ExpectInvalid(Staged().CheckBegin({.micro_batches = 5}), "run 'r' was created for at most 4 (RunSpec.accumulation)");
  ExpectInvalid(StepLimits(v1::RunSpec()).CheckBegin({.micro_batches = 2}), "at most 1");
}

TEST(StepLimitsTest, OnlyStagedRunsTakeValuesWithTheEnd) {
  const StepLimits release(SpecOf(v1::COMMIT_MODE_RELEASE));
  const absl::Status refused = release.CheckEnd({.groups = {{}, {.lr = 0.1}}});
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("give them to BeginStep"));
  EXPECT_TRUE(release.CheckEnd({.groups = {{}, {}}}).ok());
}

TEST(StepLimitsTest, AStepsClippingIsNotBesideThatOfTensors) {
  v1::RunSpec spec = SpecOf(v1::COMMIT_MODE_STAGED);
  spec.mutable_tensor_clip();
  ExpectInvalid(StepLimits(spec).CheckEnd({.max_grad_norm = 1}), "run 'r' has tensor_clip");
}

}  // namespace
}  // namespace ballast
