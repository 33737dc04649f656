#include "server/stability/spike_score.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string_view>

namespace ballast {
namespace {

// A character a step: e event, s spike, b both, . neither.
SpikeScore::Counts Score(std::string_view steps) {
  SpikeScore score;
  for (const char c : steps) score.Add(c == 'e' || c == 'b', c == 's' || c == 'b');
  return score.counts();
}

TEST(SpikeScoreTest, AnEventHitsSpikesOneToEightStepsLater) {
  EXPECT_EQ(Score("es").hits, 1u);
  EXPECT_EQ(Score("e.......s").hits, 1u);
  EXPECT_EQ(Score("e.......s").leads[8], 1u);
  EXPECT_EQ(Score("e........s").hits, 0u);
  EXPECT_EQ(Score("e........s").misses, 1u);
  EXPECT_EQ(Score("e........s").false_alarms, 1u);
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
  EXPECT_EQ(Score("e.......").false_alarms, 0u);
  EXPECT_EQ(Score("e........").false_alarms, 1u);
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
    std::set<int> events, spikes;
    SpikeScore score;
    constexpr int kSteps = 120;
    for (int step = 0; step < kSteps; ++step) {
      const bool event = random() % 9 == 0, spike = random() % 11 == 0;
      if (event) events.insert(step);
      if (spike) spikes.insert(step);
      score.Add(event, spike);
    }
    const auto any = [](const std::set<int>& in, int first, int last) {
      const auto found = in.lower_bound(first);
      return found != in.end() && *found <= last;
    };
    uint64_t hits = 0, covered = 0, false_alarms = 0;
    for (const int spike : spikes) hits += any(events, spike - 8, spike - 1) ? 1 : 0;
    for (int step = 0; step < kSteps; ++step) covered += any(events, step - 8, step - 1) ? 1 : 0;
    for (const int event : events) false_alarms += event + 8 < kSteps && !any(spikes, event + 1, event + 8) ? 1 : 0;
    EXPECT_EQ(score.counts().hits, hits);
    EXPECT_EQ(score.counts().misses, spikes.size() - hits);
    EXPECT_EQ(score.counts().covered, covered);
    EXPECT_EQ(score.counts().false_alarms, false_alarms);
  }
}

}  // namespace
}  // namespace ballast
