#include "server/device/task_levels.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace ballast {
namespace {

using Levels = std::vector<std::vector<uint32_t>>;

alignas(64) std::array<std::byte, 4096> job_memory;
const kernels::WireIndex kFp32 = kernels::FindWireFormat("fp32");

DeviceJob Job(DeviceTask task, std::optional<uint32_t> tensor) { return {.task = std::move(task), .tensor = tensor}; }

// Sixteen elements of a gradient that lies at `at`.
DeviceJob SumJob(uint32_t tensor, size_t at) {
  return Job(SumTask{.to = job_memory.data() + at, .elements = 16, .format = kFp32}, tensor);
}
DeviceJob UpdateJob(uint32_t tensor, size_t at) {
  UpdateTask task;
  task.update.grad = job_memory.data() + at;
  task.update.grad_format = kFp32;
  task.update.n = 16;
  return Job(task, tensor);
}
DeviceJob EncodeJob(uint32_t tensor) { return Job(EncodeWeightsTask{}, tensor); }
DeviceJob ScaleJob(uint32_t tensor) { return Job(ScaleTask{}, tensor); }

template <class... Jobs>
Levels LevelsOf(Jobs... jobs) {
  std::vector<DeviceJob> list;
  (list.push_back(std::move(jobs)), ...);
  TaskLevels levels;
  levels.Plan(list);
  Levels planned;
  for (size_t l = 0; l < levels.size(); ++l) planned.emplace_back(levels[l].begin(), levels[l].end());
  return planned;
}

TEST(TaskLevelsTest, DifferentTensorsGoTogether) {
  EXPECT_EQ(LevelsOf(UpdateJob(0, 0), UpdateJob(1, 64), EncodeJob(2), ScaleJob(3)), (Levels{{0, 1, 2, 3}}));
  EXPECT_EQ(LevelsOf(), Levels{});
}

TEST(TaskLevelsTest, ATensorsSumComesBeforeItsUpdateAndThatBeforeItsWeights) {
  EXPECT_EQ(LevelsOf(SumJob(0, 0), UpdateJob(0, 0), EncodeJob(0), SumJob(1, 64), UpdateJob(1, 64), EncodeJob(1)),
            (Levels{{0, 3}, {1, 4}, {2, 5}}));
}

TEST(TaskLevelsTest, WeightsAreReadByManyAtOnceAndWrittenAfterAll) {
  EXPECT_EQ(LevelsOf(EncodeJob(0), EncodeJob(0), UpdateJob(0, 0), EncodeJob(0), EncodeJob(0)),
            (Levels{{0, 1}, {2}, {3, 4}}));
  EXPECT_EQ(LevelsOf(ScaleJob(0), EncodeJob(0), EncodeJob(0), ScaleJob(0)), (Levels{{0}, {1, 2}, {3}}));
}

TEST(TaskLevelsTest, ChunksAreSummedAtOnceAndMicroBatchesInTurn) {
  EXPECT_EQ(LevelsOf(SumJob(0, 0), SumJob(0, 64), SumJob(0, 0), SumJob(0, 64), UpdateJob(0, 0)),
            (Levels{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(LevelsOf(UpdateJob(0, 0), SumJob(0, 0), SumJob(0, 64)), (Levels{{0}, {1, 2}}));
  EXPECT_EQ(LevelsOf(SumJob(0, 128), SumJob(0, 0), SumJob(0, 64), SumJob(0, 0)), (Levels{{0, 1, 2}, {3}}));
  EXPECT_EQ(LevelsOf(SumJob(0, 0), Job(SumTask{}, 0), SumJob(0, 0)), (Levels{{0, 1}, {2}}))
      << "one of nothing between them";
}

// A sum that nobody needs any more is still waiting, and the next step has its job_memory already.
TEST(TaskLevelsTest, WhereGradientsOverlapAllKeepTheirOrder) {
  EXPECT_EQ(LevelsOf(SumJob(0, 0), SumJob(1, 32), SumJob(2, 640)), (Levels{{0}, {1}, {2}}));
  EXPECT_EQ(LevelsOf(SumJob(1, 32), EncodeJob(2), UpdateJob(0, 0)), (Levels{{0}, {1}, {2}}));
  EXPECT_EQ(LevelsOf(SumJob(0, 0), SumJob(1, 64)), (Levels{{0, 1}})) << "they touch";
}

TEST(TaskLevelsTest, WhatMayWorkOnAnythingIsAlone) {
  const auto barriers = {+[] { return Job(UpdateTask{}, std::nullopt); }, +[] { return Job(LoadTask{}, 0); },
                         +[] { return Job(CopyTask{}, 0); }, +[] { return Job(CurvatureTask{}, 0); }};
  for (const auto barrier : barriers) {
    EXPECT_EQ(LevelsOf(EncodeJob(1), EncodeJob(2), barrier(), EncodeJob(1), barrier()),
              (Levels{{0, 1}, {2}, {3}, {4}}));
  }
}

}  // namespace
}  // namespace ballast
