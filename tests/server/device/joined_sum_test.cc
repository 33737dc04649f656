// A gradient's sum that the update makes which reads it: of the same bits as a task of its own.
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "server/device/cpu_device.h"
#include "tests/server/device/device_model.h"

namespace ballast {
namespace {

class JoinedSumTest : public ::testing::TestWithParam<const char*> {};

TEST_P(JoinedSumTest, AnyNumberOfThreadsGivesTheSumsBits) {
  const kernels::Kernel& kernel = testing::KernelOfRule(GetParam());
  CpuDevice one({.threads = 1}), many({.threads = 5});
  const testing::TrainOutcome apart = testing::TrainOn(&one, kernel);
  for (CpuDevice* device : {&one, &many}) {
    EXPECT_EQ(testing::WhatDiffers(apart, testing::TrainOn(device, kernel, /*joins=*/true)), "");
  }
}
INSTANTIATE_TEST_SUITE_P(Rules, JoinedSumTest,
                         ::testing::ValuesIn(kernels::RuleNames().begin(), kernels::RuleNames().end()));

// What the sum takes is no part of the update, as where it is a task of its own.
TEST(JoinedSumSecondsTest, TheSumIsNotCounted) {
  CpuDevice device({.threads = 1});
  testing::Model model(&device, *kernels::FindKernel("adamw", "split24", "companded8"), {64, 64});
  model.Load();
  model.WaitIdle();
  std::vector<double> seconds;
  for (size_t i = 0; i < 2; ++i) {  // small ones, which wait for each other
    UpdateTask task = model.MakeUpdate(i, 1);
    if (i == 1) task.sum = std::make_shared<SumTask>(model.MakeSum(i, 1));
    model.queue()->Enqueue(
        std::move(task), [&](const TaskResult& r) { seconds.push_back(r.seconds); }, i);
  }
  model.WaitIdle();
  ASSERT_EQ(seconds.size(), 2u);
  EXPECT_GT(seconds[0], 0);
  EXPECT_EQ(seconds[0], seconds[1]);
}

}  // namespace
}  // namespace ballast
