// What a run is said to do, from its steps, its ranks and the time.
#include "server/run/run_activity.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

constexpr RunActivity::Ranks kThere = {.held = 2}, kLeft = {}, kOneLost = {.lost = 1}, kOneOfTwoLost = {1, 1};
constexpr bool kStepOpen = true, kStepClosed = false;

// The time of the last of so many steps, which took this long each.
double Train(RunActivity* activity, double now_s, int steps, double step_s) {
  for (int i = 0; i < steps; ++i) {
    activity->OnOpened(now_s);
    activity->OnClosed(now_s += step_s);
  }
  return now_s;
}

TEST(RunActivity, WaitsUntilItsFirstStepWhoeverIsThere) {
  const RunActivity activity;
  EXPECT_EQ(activity.At(1, kStepClosed, kLeft), RunState::kWaiting);
  EXPECT_EQ(activity.At(1e6, kStepClosed, kThere), RunState::kWaiting);
}

TEST(RunActivity, IsInTrainingWhileAStepIsOpenHoweverLong) {
  RunActivity activity;
  activity.OnOpened(1);
  EXPECT_EQ(activity.At(1e6, kStepOpen, kThere), RunState::kTraining);
  EXPECT_EQ(activity.At(1e6, kStepOpen, kOneOfTwoLost), RunState::kTraining);
}

TEST(RunActivity, AFirstStepMayTakeTenMinutes) {
  RunActivity activity;
  EXPECT_EQ(activity.stall_after_s(), 600);
  Train(&activity, 0, 1, 100);
  EXPECT_EQ(activity.stall_after_s(), 600);
}

TEST(RunActivity, IsIdleAfterTenOfItsOwnStepsWithoutOne) {
  RunActivity activity;
  const double closed_s = Train(&activity, 1000, 100, 20);
  EXPECT_NEAR(activity.stall_after_s(), 200, 1e-9);
  EXPECT_EQ(activity.At(closed_s + 199, kStepClosed, kThere), RunState::kTraining);
  EXPECT_EQ(activity.At(closed_s + 201, kStepClosed, kThere), RunState::kIdle);
  EXPECT_EQ(activity.At(closed_s + 201, kStepOpen, kThere), RunState::kTraining);
}

TEST(RunActivity, OfFastStepsIsIdleAfterHalfAMinute) {
  RunActivity activity;
  const double closed_s = Train(&activity, 1000, 100, 0.05);
  EXPECT_EQ(activity.stall_after_s(), 30);
  EXPECT_EQ(activity.At(closed_s + 29, kStepClosed, kThere), RunState::kTraining);
  EXPECT_EQ(activity.At(closed_s + 31, kStepClosed, kThere), RunState::kIdle);
}

TEST(RunActivity, APauseAmongTheStepsIsSoonForgotten) {
  RunActivity activity;
  double now_s = Train(&activity, 1000, 100, 20);
  now_s = Train(&activity, now_s + 3600, 1, 20);
  EXPECT_NEAR(activity.stall_after_s(), 200, 1e-9);
  EXPECT_NEAR(activity.pace_s(), 20, 1e-9);
  Train(&activity, now_s, 64, 20);
  EXPECT_NEAR(activity.stall_after_s(), 200, 1e-9);
}

TEST(RunActivity, APauseIsNoTrainingThatIsOnNoDisk) {
  RunActivity activity;
  double now_s = Train(&activity, 1000, 100, 0.25);
  activity.OnCheckpointBegun();
  now_s = Train(&activity, now_s, 40, 0.25);
  EXPECT_NEAR(activity.unsaved_s(), 35, 1e-9) << "the checkpoint is not written yet";
  activity.OnCheckpointWritten();
  EXPECT_NEAR(activity.unsaved_s(), 10, 1e-9);
  now_s = Train(&activity, now_s + 75, 40, 0.25);
  EXPECT_NEAR(activity.unsaved_s(), 20.25, 1e-9) << "of the pause one step's time counts";
  EXPECT_NEAR(activity.pace_s(), 0.25, 1e-9);
  activity.OnOpened(now_s);
  activity.OnClosed(now_s + 100, /*updated=*/false);
  EXPECT_NEAR(activity.unsaved_s(), 20.25, 1e-9) << "nothing to lose";
}

// The gradients of a step are computed before it begins.
TEST(RunActivity, TheTimeBetweenStepsIsTrainingTooWhereItIsNoPause) {
  RunActivity activity;
  for (double now_s = 10; now_s < 500; now_s += 10) {
    activity.OnOpened(now_s + 9);
    activity.OnClosed(now_s + 10);
  }
  EXPECT_NEAR(activity.unsaved_s(), 481, 1e-9);
}

TEST(RunActivity, FollowsStepsThatBecomeSlower) {
  RunActivity activity;
  const double now_s = Train(&activity, 1000, 100, 1);
  Train(&activity, now_s, 100, 60);
  EXPECT_GT(activity.stall_after_s(), 550);
}

TEST(RunActivity, IsFinishedOnceEachRankHasLeftCleanly) {
  RunActivity activity;
  const double closed_s = Train(&activity, 0, 3, 1);
  EXPECT_EQ(activity.At(closed_s, kStepClosed, kLeft), RunState::kFinished);
  EXPECT_EQ(activity.At(closed_s + 1e6, kStepClosed, kLeft), RunState::kFinished);
}

TEST(RunActivity, WaitsForTrainersThatWereLost) {
  RunActivity activity;
  const double closed_s = Train(&activity, 0, 3, 1);
  EXPECT_EQ(activity.At(closed_s, kStepClosed, kOneLost), RunState::kWaiting);
  EXPECT_EQ(activity.At(closed_s, kStepClosed, kThere), RunState::kTraining) << "they have come back";
}

}  // namespace
}  // namespace ballast
