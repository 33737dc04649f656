#include "server/device/batch_groups.h"

#include <gtest/gtest.h>

#include <array>
#include <deque>

namespace ballast {
namespace {

using Group = BatchGroups::Group;

std::array<std::byte, 3> plane_of;
std::array<float, 3> scale_of;
const kernels::Kernel& kAdamw = *kernels::FindKernel("adamw", "split24", "companded8");
const kernels::MasterFormat& kSplit24 = *kernels::FindMasterFormat("split24");

DeviceTask Update(size_t tensor, uint64_t elements = 100) {
  UpdateTask task{.kernel = &kAdamw};
  task.update.planes[0] = &plane_of[tensor];
  task.update.n = elements;
  return task;
}
DeviceTask Scale(size_t tensor) {
  return ScaleTask{.master = &kSplit24, .planes = {&plane_of[tensor]}, .scales = &scale_of[tensor]};
}
DeviceTask Encode(size_t tensor, const char* format = "bf16", uint64_t elements = 100) {
  return EncodeWeightsTask{
      .master = &kSplit24, .planes = {&plane_of[tensor]}, .format = kernels::FindWireFormat(format), .last = elements};
}
DeviceTask EncodeScaled(size_t tensor) {
  DeviceTask task = Encode(tensor, "int8-tensor");
  std::get<EncodeWeightsTask>(task).scales = &scale_of[tensor];
  std::get<EncodeWeightsTask>(task).row_length = 100;
  return task;
}

class BatchGroupsTest : public ::testing::Test {
 protected:
  // Whether the last of them can join the others, which all can.
  template <class... Tasks>
  bool Joins(Tasks... tasks) {
    groups_.Clear();
    tasks_.clear();
    (tasks_.push_back(std::move(tasks)), ...);
    for (size_t i = 0; i + 1 < tasks_.size(); ++i) {
      EXPECT_TRUE(groups_.CanJoin(tasks_[i])) << i;
      groups_.Join(&tasks_[i]);
    }
    return groups_.CanJoin(tasks_.back());
  }

  std::deque<DeviceTask> tasks_;
  BatchGroups groups_{{.tiles = 4, .payload_bytes = 4 * kernels::kPad, .scales = 2}};
};

TEST_F(BatchGroupsTest, WhatIsOfAKindIsLaunchedTogetherInOrder) {
  EXPECT_TRUE(Joins(Update(0), EncodeScaled(0), Update(1), Scale(2)));
  EXPECT_EQ(groups_.size(), 3u);
  ASSERT_EQ(groups_[Group::kGradients].size(), 2u);
  EXPECT_EQ(groups_[Group::kGradients][0], &tasks_[0]);
  EXPECT_EQ(groups_[Group::kGradients][1], &tasks_[2]);
  ASSERT_EQ(groups_[Group::kServes].size(), 1u);
  EXPECT_TRUE(groups_[Group::kScales].empty());
  groups_.Clear();
  EXPECT_TRUE(groups_.empty() && groups_[Group::kGradients].empty());
}

TEST_F(BatchGroupsTest, AnUpdatePassesNothingOfItsTensor) {
  EXPECT_TRUE(Joins(Encode(0), Update(1)));
  EXPECT_TRUE(Joins(Scale(0), Update(1)));
  EXPECT_FALSE(Joins(Encode(0), Update(0)));
  EXPECT_FALSE(Joins(Scale(0), Update(0)));
  EXPECT_FALSE(Joins(Update(0), Update(0)));
}

TEST_F(BatchGroupsTest, ScalesAreNotRaisedWhileTheyAreRead) {
  EXPECT_TRUE(Joins(Update(0), Scale(0), EncodeScaled(0)));
  EXPECT_TRUE(Joins(EncodeScaled(0), Scale(1)));
  EXPECT_FALSE(Joins(EncodeScaled(0), Scale(0)));
  EXPECT_FALSE(Joins(Scale(0), Scale(0)));
}

// Scales of a tensor as it was are kept where those of its present weights are.
TEST_F(BatchGroupsTest, NorWhereTheyAreOfOtherPlanes) {
  const auto past = [] {
    DeviceTask task = Scale(1);
    std::get<ScaleTask>(task).scales = &scale_of[0];
    return task;
  };
  EXPECT_FALSE(Joins(EncodeScaled(0), past()));
  EXPECT_FALSE(Joins(Scale(0), past()));
}

TEST_F(BatchGroupsTest, WeightsGoOutManyTimesAtOnce) { EXPECT_TRUE(Joins(Encode(0), Encode(0))); }

TEST_F(BatchGroupsTest, OneLaunchIsOfOneKernelAndOneFormat) {
  const auto by = [](size_t tensor, const char* rule) {
    DeviceTask task = Update(tensor);
    std::get<UpdateTask>(task).kernel = kernels::FindKernel(rule, "split24", "companded8");
    return task;
  };
  EXPECT_FALSE(Joins(by(0, "adamw"), by(1, "lion")));
  EXPECT_FALSE(Joins(by(0, "muon"), by(1, "muon")));
  EXPECT_FALSE(Joins(Update(0), MeasureTask{.elements = 1}));
  EXPECT_FALSE(Joins(Encode(0), Encode(1, "fp32")));
}

TEST_F(BatchGroupsTest, ALoadAndACopyAreAlone) {
  EXPECT_FALSE(Joins(Update(0), LoadTask{}));
  EXPECT_FALSE(Joins(LoadTask{}, Update(0)));
  EXPECT_FALSE(Joins(LoadTask{}, LoadTask{}));
  EXPECT_FALSE(Joins(Update(0), CopyTask{}));
  EXPECT_FALSE(Joins(CopyTask{}, Update(0)));
}

TEST_F(BatchGroupsTest, ItHoldsWhatTheStagingHasRoomFor) {
  EXPECT_TRUE(Joins(Update(0, 3 * kernels::kTile), Update(1, kernels::kTile)));
  EXPECT_FALSE(Joins(Update(0, 3 * kernels::kTile), Update(1, kernels::kTile + 1)));
  EXPECT_TRUE(Joins(Encode(0, "bf16", kernels::kPad), Encode(1, "bf16", kernels::kPad)));
  EXPECT_FALSE(Joins(Encode(0, "bf16", kernels::kPad), Encode(1, "bf16", kernels::kPad + 1)));
  EXPECT_TRUE(Joins(EncodeScaled(0), EncodeScaled(1)));
  EXPECT_FALSE(Joins(EncodeScaled(0), EncodeScaled(1), EncodeScaled(2)));
  const DeviceTask one = MeasureTask{};
  groups_.Clear();
  for (size_t i = 0; i < BatchGroups::kMostTasks; ++i) {
    ASSERT_TRUE(groups_.CanJoin(one));
    groups_.Join(&one);
  }
  EXPECT_FALSE(groups_.CanJoin(one));
}

}  // namespace
}  // namespace ballast
