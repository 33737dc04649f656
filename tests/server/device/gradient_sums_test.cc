// Sums of a gradient that the update makes which reads it: of the same bits as tasks of their own.
#include "server/device/gradient_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "server/device/cpu_device.h"
#include "tests/server/device/device_model.h"

namespace ballast {
namespace {

using testing::Model;

class GradientSumsTest : public ::testing::TestWithParam<const char*> {};

TEST_P(GradientSumsTest, AnyNumberOfThreadsGivesTheBitsOfTasksOfTheirOwn) {
  const kernels::Kernel& kernel = testing::KernelOfRule(GetParam());
  CpuDevice one({.threads = 1}), many({.threads = 5});
  const testing::TrainOutcome apart = testing::TrainOn(&one, kernel, &Model::ApartStep);
  for (CpuDevice* device : {&one, &many}) {
    EXPECT_EQ(testing::WhatDiffers(apart, testing::TrainOn(device, kernel, &Model::BroughtStep)), "");
    EXPECT_EQ(testing::WhatDiffers(apart, testing::TrainOn(device, kernel, &Model::WaitingStep)), "");
  }
  const testing::TrainOutcome summed = testing::TrainOn(&one, kernel, &Model::SummedStep);
  EXPECT_EQ(testing::WhatDiffers(summed, testing::TrainOn(&many, kernel, &Model::JoinedStep)), "");
}
INSTANTIATE_TEST_SUITE_P(Rules, GradientSumsTest,
                         ::testing::ValuesIn(kernels::RuleNames().begin(), kernels::RuleNames().end()));

// On one thread, with a tensor of two parts and one of the least size.
class WaitingSumsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 3 * kernels::kTile;
  static constexpr float kUntouched = 7;

  WaitingSumsTest() {
    for (Model* model : {&apart_, &model_}) model->Load();
    apart_.WaitIdle();
    model_.WaitIdle();
    std::ranges::fill(model_.Gradient(1), kUntouched);
  }
  // Whether part 0 or 1 of tensor 1 was not written where it would be summed.
  bool Untouched(int part) {
    const auto half = model_.Gradient(1).subspan(part == 0 ? 0 : 2 * kernels::kTile, kernels::kTile);
    return std::ranges::all_of(half, [](float x) { return x == kUntouched; });
  }
  void SubmitPart(Model* model, uint64_t t, int part) {
    const uint64_t middle = 2 * kernels::kTile;
    model->SubmitSum(1, part == 0 ? model->MakePart(1, t, 0, middle, /*adds=*/false)
                                  : model->MakePart(1, t, middle, kElements, /*adds=*/false));
  }
  // The same, one task at a time.
  void UpdateApart(uint64_t t = 1) {
    for (const int part : {0, 1}) SubmitPart(&apart_, t, part);
    apart_.WaitIdle();
    apart_.UpdateOne(1, t, /*measured=*/false);
    apart_.WaitIdle();
  }
  void ExpectTheSame() {
    apart_.EncodeTensor(1, "fp32", 1);
    model_.EncodeTensor(1, "fp32", 1);
    apart_.WaitIdle();
    model_.WaitIdle();
    EXPECT_TRUE(apart_.served() == model_.served());
  }

  CpuDevice device_{{.threads = 1}};
  const kernels::Kernel& kernel_ = *kernels::FindKernel("adamw", "split24", "companded8");
  Model apart_{&device_, kernel_, {64, kElements}}, model_{&device_, kernel_, {64, kElements}};
};

TEST_F(WaitingSumsTest, WhatOneRankHasSentIsReadWhereItLies) {
  std::vector<std::string> answered;
  model_.Held([&] {
    SubmitPart(&model_, 1, 1);
    model_.UpdateOne(0, 1, /*measured=*/false);
    SubmitPart(&model_, 1, 0);
    model_.queue()->Submit(
        model_.MakeUpdate(1, 1),
        [&](const TaskResult&) { answered.push_back(model_.sums() == 2 ? "sums first" : "too early"); }, 1);
  });
  EXPECT_TRUE(Untouched(0) && Untouched(1));
  EXPECT_EQ(answered, std::vector<std::string>{"sums first"});
  UpdateApart();
  ExpectTheSame();
}

TEST_F(WaitingSumsTest, APartThatWasSummedBeforeIsTakenFromThere) {
  SubmitPart(&model_, 1, 0);
  model_.WaitIdle();
  model_.Held([&] {
    SubmitPart(&model_, 1, 1);
    model_.UpdateOne(1, 1, /*measured=*/false);
  });
  EXPECT_FALSE(Untouched(0));
  EXPECT_TRUE(Untouched(1));
  UpdateApart();
  ExpectTheSame();
}

// Weights that go out, and copies, do not read it.
TEST_F(WaitingSumsTest, WhatDoesNotReadTheGradientIsNoHindrance) {
  UpdateApart(1);
  apart_.EncodeTensor(1, "bf16", 1);
  UpdateApart(2);
  for (const int part : {0, 1}) SubmitPart(&model_, 1, part);
  model_.WaitIdle();
  model_.UpdateOne(1, 1, /*measured=*/false);
  model_.WaitIdle();
  std::ranges::fill(model_.Gradient(1), kUntouched);
  model_.Held([&] {
    SubmitPart(&model_, 2, 0);
    model_.EncodeTensor(1, "bf16", 1);
    SubmitPart(&model_, 2, 1);
    model_.UpdateOne(1, 2, /*measured=*/false);
  });
  EXPECT_TRUE(Untouched(0) && Untouched(1));
  ExpectTheSame();
}

TEST_F(WaitingSumsTest, WhatIsMeasuredInBetweenIsSummedBefore) {
  std::vector<double> squares;
  model_.Held([&] {
    for (const int part : {0, 1}) SubmitPart(&model_, 1, part);
    std::vector<kernels::TileStatistics> tiles(4);
    model_.queue()->Submit(
        MeasureTask{.gradient = reinterpret_cast<const std::byte*>(model_.Gradient(1).data()),
                    .format = kernels::FindWireFormat("fp32"),
                    .elements = kElements,
                    .scale = 1,
                    .tiles = model_.MakeUpdate(1, 1).tiles},
        [&](const TaskResult& r) { squares.push_back(r.statistics.grad_sq); }, 1);
    model_.UpdateOne(1, 1, /*measured=*/true);
  });
  EXPECT_FALSE(Untouched(0) || Untouched(1));
  UpdateApart();
  EXPECT_EQ(squares, std::vector{apart_.statistics().back().grad_sq});
  ExpectTheSame();
}

// A step that came to nothing has left a sum where this gradient lies otherwise.
TEST_F(WaitingSumsTest, ASumOfAnEarlierStepIsNoPart) {
  UpdateApart();
  model_.Held([&] {
    SumTask earlier = model_.MakePart(1, 7, 0, 2 * kernels::kTile, /*adds=*/false);
    earlier.to += kernels::kTile * sizeof(float);
    model_.SubmitSum(1, std::move(earlier));
    for (const int part : {0, 1}) SubmitPart(&model_, 1, part);
    model_.UpdateOne(1, 1, /*measured=*/false);
  });
  EXPECT_EQ(model_.sums(), 3u);
  ExpectTheSame();
}

// Of two micro-batches the earlier is summed at its place, and the later by the update.
TEST_F(WaitingSumsTest, OfTwoSumsOfAPartTheLastIsMadeByTheUpdate) {
  for (const bool waits : {false, true}) {
    Model* const model = waits ? &model_ : &apart_;
    const auto submit = [&](uint64_t t, bool first) {
      SumTask sum = model->MakePart(1, t, 0, kElements, /*adds=*/true);
      sum.first = first;
      model->SubmitSum(1, std::move(sum));
      if (!waits) model->WaitIdle();
    };
    const auto both = [&] {
      submit(1, /*first=*/true);
      submit(2, /*first=*/false);
      model->UpdateOne(1, 1, /*measured=*/false);
    };
    waits ? model->Held(both) : both();
    model->WaitIdle();
  }
  EXPECT_EQ(model_.sums(), 2u);
  ExpectTheSame();
}

// What an update is asked for is told before it: the sums that wait for nothing are no part of it.
TEST_F(WaitingSumsTest, WhoAsksWhetherSumsAreMadeIsNotToldTooEarly) {
  bool told = false;
  model_.Held([&] {
    for (const int part : {0, 1}) SubmitPart(&model_, 1, part);
    model_.queue()->Submit(
        SumTask{}, [&](const TaskResult&) { told = model_.sums() == 2 && !Untouched(0) && !Untouched(1); }, 1);
    model_.UpdateOne(1, 1, /*measured=*/false);
  });
  EXPECT_TRUE(told);
  UpdateApart();
  ExpectTheSame();
}

// What the sum takes is no part of the update, as where it is a task of its own.
TEST(GradientSumsSecondsTest, TheSumIsNotCounted) {
  CpuDevice device({.threads = 1});
  Model model(&device, *kernels::FindKernel("adamw", "split24", "companded8"), {64, 64});
  model.Load();
  model.WaitIdle();
  std::vector<double> seconds;
  for (size_t i = 0; i < 2; ++i) {  // small ones, which wait for each other
    UpdateTask task = model.MakeUpdate(i, 1);
    if (i == 1) {
      task.sums = std::make_shared<GradientSums>();
      task.sums->push_back(model.MakeSum(i, 1));
    }
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
