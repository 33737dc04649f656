#include "server/plan.h"

#include <gtest/gtest.h>

#include "server/convert.h"
#include "server/cpu_device.h"
#include "server/parameter_store.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using testing::MakeSpec;
using testing::SmallSpec;

RunSpec Made(const v1::RunSpec& spec) { return ToRunSpec(spec, {}).value(); }

TEST(PlanTest, CountsTheDefaultsOfAnAlignedTensorByHand) {
  constexpr uint64_t kN = 1 << 20;
  const Plan plan = MakePlan(Made(MakeSpec("r1", {{"w", {1 << 20}}})));
  EXPECT_EQ(plan.parameters, kN);
  EXPECT_EQ(plan.bytes.weights, 3 * kN);
  EXPECT_EQ(plan.bytes.momentum, kN + kN / 32 * 2);
  EXPECT_EQ(plan.bytes.variance, kN + kN / 32 * 2);
  EXPECT_EQ(plan.bytes.padding, 0u);
  EXPECT_EQ(plan.bytes.gradients, 2 * kN);  // all of them: less than twice the largest
  EXPECT_EQ(plan.push_bytes, 2 * kN);
  EXPECT_EQ(plan.pull_bytes, 2 * kN);
}

TEST(PlanTest, PaddingOfATinyTensorIsCounted) {
  const Plan plan = MakePlan(Made(MakeSpec("r1", {{"b", {1}}})));
  EXPECT_EQ(plan.bytes.weights, 256u * 2 + 256);
  EXPECT_EQ(plan.bytes.momentum, 256u + 64);  // codes; 8 scales of 2 bytes take an aligned 64
  EXPECT_EQ(plan.bytes.padding, plan.bytes.weights - 3 + 2 * (256 + 64 - 3));
}

TEST(PlanTest, ThePoolHoldsTwiceTheLargestOrTheCredit) {
  RunSpec spec = Made(MakeSpec("r1", {{"a", {1000000}}, {"b", {1000000}}, {"c", {1000000}}, {"d", {64}}}));
  spec.credit_bytes = 64;
  EXPECT_EQ(MakePlan(spec).bytes.gradients, 2 * AlignUp(2000000));
  spec.credit_bytes = 5000000;
  EXPECT_EQ(MakePlan(spec).bytes.gradients, AlignUp(5000000));
  spec.credit_bytes = 1 << 30;
  EXPECT_EQ(MakePlan(spec).bytes.gradients, 3 * AlignUp(2000000) + 128);
}

TEST(PlanTest, TheStoreAllocatesExactlyThePlanForEveryKernel) {
  CpuDevice device({.threads = 1});
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    v1::RunSpec wire = SmallSpec();
    wire.mutable_groups(0)->set_rule(kernel.rule);
    wire.mutable_groups(0)->set_master(kernel.master);
    wire.mutable_groups(0)->set_state(kernel.state);
    const RunSpec spec = Made(wire);
    Strand strand({.name = "t"});
    const auto store = ParameterStore::Create({.spec = &spec, .device = &device, .strand = &strand});
    ASSERT_TRUE(store.ok()) << store.status();
    const PlanBytes plan = MakePlan(spec).bytes, live = (*store)->bytes();
    EXPECT_EQ(live.weights, plan.weights);
    EXPECT_EQ(live.momentum, plan.momentum);
    EXPECT_EQ(live.variance, plan.variance);
    EXPECT_EQ(device.allocated_bytes(), plan.weights + plan.momentum + plan.variance + live.staging);
    strand.Stop();
  }
  EXPECT_EQ(device.allocated_bytes(), 0u);
}

}  // namespace
}  // namespace ballast
