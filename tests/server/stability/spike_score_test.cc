#include "server/stability/spike_score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast {
namespace {

// A character a step: e event, s spike, b both, . neither.
SpikeScore::Counts Score(std::string_view steps) {
  SpikeScore score;
  for (const char c : steps) score.Add(c == 'e' || c == 'b', c == 's' || c == 'b' ? std::optional(0u) : std::nullopt);
  return score.counts();
}

TEST(SpikeScoreTest, AnEventHitsSpikesOneToEightStepsLater) {
  EXPECT_EQ(Score("es").hits, 1u);
  EXPECT_EQ(Score("e.......s").hits, 1u);
  EXPECT_EQ(Score("e.......s").leads[8], 1u);
  EXPECT_EQ(Score("e........s").hits, 0u);
  EXPECT_EQ(Score("e........s").misses, 1u);
  EXPECT_EQ(Score("e........s........").false_alarms, 1u);
}

TEST(SpikeScoreTest, AnEventOfTheSameStepToldNothingBefore) {
  EXPECT_EQ(Score("b").hits, 0u);
  EXPECT_EQ(Score("b").misses, 1u);
}

TEST(SpikeScoreTest, TheLeadIsThatOfTheLastEvent) {
  EXPECT_EQ(Score("e.e..s").leads[3], 1u);
  EXPECT_EQ(Score("e.e..s").leads[5], 0u);
  EXPECT_EQ(Score("e.e..s........").false_alarms, 0u);
}

TEST(SpikeScoreTest, AlarmsAreFalseOnlyWhenTheirTimeIsOver) {
  EXPECT_EQ(Score("e................").false_alarms, 0u) << "a spike that began in time may become known yet";
  EXPECT_EQ(Score("e.................").false_alarms, 1u);
}

TEST(SpikeScoreTest, ASpikeIsHitBeforeItsFirstStepAlone) {
  SpikeScore score;
  for (const char c : std::string_view("e..e.")) score.Add(c == 'e', std::nullopt);
  score.Add(false, 3);  // it began with the fourth step, whose event came too late
  EXPECT_EQ(score.counts().hits, 1u);
  EXPECT_EQ(score.counts().leads[2], 1u) << "of the first event";
  for (int i = 0; i < 30; ++i) score.Add(false, std::nullopt);
  EXPECT_EQ(score.counts().false_alarms, 0u) << "the late one is none";
}

TEST(SpikeScoreTest, ASpikeThatBecomesKnownTooLateIsNeitherHitNorMissed) {
  SpikeScore score;
  score.Add(true, std::nullopt);
  for (int i = 0; i < 11; ++i) score.Add(false, std::nullopt);
  score.Add(false, 10);
  for (int i = 0; i < 30; ++i) score.Add(false, std::nullopt);
  EXPECT_EQ(score.counts().hits + score.counts().misses, 0u);
  EXPECT_EQ(score.counts().false_alarms, 0u) << "it may have told of the spike, or have come with it";
}

TEST(SpikeScoreTest, ChanceIsTheShareOfStepsThatEventsCover) {
  EXPECT_DOUBLE_EQ(Score("e.........").chance(), 0.8);
  EXPECT_DOUBLE_EQ(Score("..........").chance(), 0);
  EXPECT_DOUBLE_EQ(SpikeScore().counts().chance(), 0);
}

// Counts from whole lists of steps, instead of step by step.
TEST(SpikeScoreTest, CountsWhatALookBackOverAllStepsWould) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    std::set<int> events;
    std::vector<std::pair<int, int>> spikes;  // first step, and the one that made it known
    SpikeScore score;
    constexpr int kSteps = 120;
    for (int step = 0; step < kSteps; ++step) {
      const bool event = random() % 9 == 0, spike = random() % 11 == 0;
      const int age = std::min(step, static_cast<int>(random() % 10));
      if (event) events.insert(step);
      if (spike) spikes.emplace_back(step - age, step);
      score.Add(event, spike ? std::optional(static_cast<uint32_t>(age)) : std::nullopt);
    }
    const auto any = [&](int first, int last) {
      const auto found = events.lower_bound(first);
      return found != events.end() && *found <= last;
    };
    const auto settled = [&](int event) {
      return std::any_of(spikes.begin(), spikes.end(),
                         [&](const auto& spike) { return event >= spike.first - 8 && event <= spike.second; });
    };
    uint64_t hits = 0, covered = 0, false_alarms = 0;
    for (const auto& [first, known] : spikes) hits += any(first - 8, first - 1) ? 1 : 0;
    for (int step = 0; step < kSteps; ++step) covered += any(step - 8, step - 1) ? 1 : 0;
    for (const int event : events) false_alarms += event + 17 < kSteps && !settled(event) ? 1 : 0;
    EXPECT_EQ(score.counts().hits, hits);
    EXPECT_EQ(score.counts().misses, spikes.size() - hits);
    EXPECT_EQ(score.counts().covered, covered);
    EXPECT_EQ(score.counts().false_alarms, false_alarms);
  }
}

}  // namespace
}  // namespace ballast
