#include "server/convert/amendment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "server/convert/canonical_spec.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::SmallSpec;

absl::Status Check(const std::function<void(v1::RunSpec*)>& change) {
  v1::RunSpec asked = SmallSpec();
  change(&asked);
  EXPECT_TRUE(ToRunSpec(asked, {}).ok()) << ToRunSpec(asked, {}).status();
  return CheckAmendment(Canonical(SmallSpec()), Canonical(asked));
}

void AddTensor(v1::RunSpec* spec, const std::string& name, uint32_t group) {
  v1::TensorSpec* added = spec->add_tensors();
  added->set_name(name);
  added->set_dtype("fp32");
  added->set_group(group);
}

TEST(AmendmentTest, TensorsGroupsAndWhatStepsDoMayChange) {
  const std::function<void(v1::RunSpec*)> changes[] = {
      [](v1::RunSpec*) {},
      [](v1::RunSpec* s) { AddTensor(s, "new", 0); },
      [](v1::RunSpec* s) {
        *s->add_groups() = s->groups(0);
        AddTensor(s, "new", 1);
        s->mutable_tensors(0)->set_group(1);
      },
      [](v1::RunSpec* s) {
        v1::GroupSpec* other = s->add_groups();
        other->set_rule("sgd");
        other->set_master("fp32");
        other->set_state("fp32");
        AddTensor(s, "new", 1);
      },
      [](v1::RunSpec* s) { (*s->mutable_groups(0)->mutable_hyper())["eps"] = 1e-6; },
      [](v1::RunSpec* s) { s->mutable_groups(0)->set_rule("adam"); },
      [](v1::RunSpec* s) { s->mutable_groups(0)->set_rounding("nearest"); },
      [](v1::RunSpec* s) { s->mutable_groups(0)->set_master("fp32"); },
      [](v1::RunSpec* s) { s->mutable_groups(0)->set_state("bf16"); },
      [](v1::RunSpec* s) { s->mutable_groups(0)->set_serving("int8-row"); },
      [](v1::RunSpec* s) { s->mutable_groups(0)->set_gradient("fp8-e5m2"); },
      [](v1::RunSpec* s) { s->mutable_tensors(1)->set_lr_scale(0.5); },
      [](v1::RunSpec* s) { s->set_accumulation(4); },
  };
  for (const auto& change : changes) EXPECT_TRUE(Check(change).ok()) << Check(change);
}

TEST(AmendmentTest, AClipMayComeAndGo) {
  v1::RunSpec plain = SmallSpec(), clipped = SmallSpec();
  plain.set_commit(v1::COMMIT_MODE_STAGED);
  clipped.set_commit(v1::COMMIT_MODE_STAGED);
  clipped.set_max_grad_norm(1);
  EXPECT_TRUE(CheckAmendment(Canonical(plain), Canonical(clipped)).ok());
  EXPECT_TRUE(CheckAmendment(Canonical(clipped), Canonical(plain)).ok());
}

TEST(AmendmentTest, WhatIsForTheRunsWholeLifeIsRefusedByName) {
  const std::pair<std::function<void(v1::RunSpec*)>, const char*> changes[] = {
      {[](v1::RunSpec* s) { s->set_commit(v1::COMMIT_MODE_STAGED); }, "commit is COMMIT_MODE_RELEASE"},
      {[](v1::RunSpec* s) { s->set_ranks(2); }, "ranks is 1, asked for is 2"},
      {[](v1::RunSpec* s) { s->set_seed(8); }, "seed is 7, asked for is 8"},
      {[](v1::RunSpec* s) { s->set_reduction(v1::REDUCTION_SUM); }, "reduction is REDUCTION_MEAN"},
      {[](v1::RunSpec* s) { s->mutable_rewind()->set_snapshots(2); }, "rewind"},
      {[](v1::RunSpec* s) { s->mutable_tensor_clip(); }, "tensor_clip"},
      {[](v1::RunSpec* s) { s->mutable_spikes()->set_curvature(true); }, "spikes.curvature"},
  };
  for (const auto& [change, why] : changes) {
    const absl::Status refused = Check(change);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << why;
    EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr(why), HasSubstr("a run of another name")));
  }
}

TEST(AmendmentTest, ATensorStaysWhatItIs) {
  const std::pair<std::function<void(v1::RunSpec*)>, const char*> changes[] = {
      {[](v1::RunSpec* s) { s->mutable_tensors()->RemoveLast(); },
       "tensor 'layers.0.b' is left out, and a run keeps its tensors: name it, and freeze it instead"},
      {[](v1::RunSpec* s) { s->mutable_tensors()->SwapElements(0, 1); },
       "tensor 'embed.weight' is number 0 of the run and 1 of the spec"},
      {[](v1::RunSpec* s) { s->mutable_tensors(1)->set_shape(0, 32); },
       "tensor 'layers.0.w': tensors[0].shape[0] is 64"},
      {[](v1::RunSpec* s) { s->mutable_tensors(1)->set_dtype("bf16"); }, "tensor 'layers.0.w': tensors[0].dtype is"},
      {[](v1::RunSpec* s) { s->mutable_groups(0)->set_rule("stable_adamw"); },
       "the rule of tensor 'embed.weight' is adamw with state companded8, asked for is stable_adamw with companded8"},
      {[](v1::RunSpec* s) {
         s->mutable_groups(0)->set_rule("lion");
         s->mutable_groups(0)->set_master("split24");
         s->mutable_groups(0)->set_state("companded8");
       },
       "the rule of tensor 'embed.weight' is adamw with state companded8, asked for is lion with companded8"},
  };
  for (const auto& [change, why] : changes) {
    const absl::Status refused = Check(change);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << why;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(why));
  }
}

}  // namespace
}  // namespace ballast
