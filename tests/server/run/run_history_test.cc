#include "server/run/run_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<uint64_t> Steps(const std::vector<StepRecord>& records) {
  std::vector<uint64_t> steps;
  for (const StepRecord& record : records) steps.push_back(record.step);
  return steps;
}

TEST(RunHistoryTest, GivesTheNewestOfLaterSteps) {
  RunHistory history;
  EXPECT_THAT(history.Since(0, 10), IsEmpty());
  for (uint64_t step = 1; step <= 5; ++step) history.Add({.step = step});
  EXPECT_THAT(Steps(history.Since(0, 10)), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_THAT(Steps(history.Since(3, 10)), ElementsAre(4, 5));
  EXPECT_THAT(Steps(history.Since(1, 2)), ElementsAre(4, 5));
  EXPECT_THAT(history.Since(5, 10), IsEmpty());
}

TEST(RunHistoryTest, KeepsSoManyAndNoMore) {
  RunHistory history;
  for (uint64_t step = 1; step <= RunHistory::kSteps + 10; ++step) history.Add({.step = step});
  const auto all = history.Since(0, SIZE_MAX);
  EXPECT_EQ(all.size(), RunHistory::kSteps);
  EXPECT_EQ(all.front().step, 11u);
}

TEST(RunHistoryTest, ListsOfTensorsAreNotKept) {
  RunHistory history;
  history.Add({.step = 1, .outcome = Outcome::kPartial, .not_applied = {0, 2}, .left_out = {1}});
  EXPECT_THAT(history.Since(0, 1).front().not_applied, IsEmpty());
  EXPECT_THAT(history.Since(0, 1).front().left_out, ElementsAre(1));
}

TEST(RunHistoryTest, StepsMadeAnewAfterARewindComeAgain) {
  RunHistory history;
  for (const uint64_t step : {1, 2, 3, 2, 3}) history.Add({.step = step});
  EXPECT_THAT(Steps(history.Since(0, 10)), ElementsAre(1, 2, 3, 2, 3));
  EXPECT_THAT(Steps(history.Since(2, 10)), ElementsAre(3)) << "what a reader that saw step 2 anew lacks";
}

}  // namespace
}  // namespace ballast
