#include "server/stability/spike_detector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr double kThreshold = 2.3;

class SpikeDetectorTest : public ::testing::Test {
 protected:
  static SpikeSettings Settings(uint32_t warmup) {
    SpikeSettings settings;
    settings.warmup_steps = warmup;
    settings.rms_margin = 0;
    return settings;
  }
  // One step of one layer.
  static StepFindings Step(uint64_t step, double rms) {
    return {.step = step, .rms = {{.value = rms, .tensor = 7}}, .curvature = {{}}};
  }
  // The steps, from 1 on, with an RMS event.
  static std::vector<uint64_t> RmsEvents(const std::vector<double>& rms, uint32_t warmup = 0) {
    SpikeDetector detector(Settings(warmup), {kThreshold});
    std::vector<uint64_t> steps;
    for (uint64_t i = 0; i < rms.size(); ++i) {
      for (const SpikeEvent& e : detector.Observe(Step(i + 1, rms[i]))) {
        EXPECT_EQ(e.kind, SpikeKind::kRms);
        steps.push_back(i + 1);
      }
    }
    return steps;
  }
  // The steps, from 1 on, with an outlier of the norm.
  static std::vector<uint64_t> NormEvents(const std::vector<double>& norms) {
    SpikeDetector detector(Settings(0), {});
    std::vector<uint64_t> steps;
    for (uint64_t i = 0; i < norms.size(); ++i) {
      for (const SpikeEvent& e : detector.Observe({.step = i + 1, .grad_norm = norms[i]})) {
        EXPECT_EQ(e.kind, SpikeKind::kGradientNorm);
        steps.push_back(i + 1);
      }
    }
    return steps;
  }
  // 1, 2, 1, 2, ...: mean 1.5, standard deviation 0.5.
  static std::vector<double> Calm(size_t steps) {
    std::vector<double> series;
    for (size_t i = 0; i < steps; ++i) series.push_back(1 + static_cast<double>(i % 2));
    return series;
  }
  static std::vector<double> With(std::vector<double> series, double next) {
    series.push_back(next);
    return series;
  }
};

TEST_F(SpikeDetectorTest, ACrossingIsOneEventAndTellsWhere) {
  SpikeDetector detector(Settings(0), {9, kThreshold});
  const auto events = detector.Observe(
      {.step = 3, .rms = {{.value = 5, .tensor = 1}, {.value = 2.3, .tensor = 4}}, .curvature = {{}, {}}});
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, SpikeKind::kRms);
  EXPECT_EQ(events[0].layer, 1u);
  EXPECT_EQ(events[0].tensor, 4u);
  EXPECT_EQ(events[0].value, 2.3);
  EXPECT_EQ(events[0].threshold, kThreshold);
  EXPECT_THAT(RmsEvents({1, 1, 2.4, 3, 2.5, 9}), ElementsAre(3));
}

TEST_F(SpikeDetectorTest, AValueThatHoversAtTheThresholdIsOneEvent) {
  std::vector<double> rms;
  for (int i = 0; i < 40; ++i) rms.push_back(i % 2 == 0 ? 2.31 : 2.2);  // never under 2.07
  EXPECT_THAT(RmsEvents(rms), ElementsAre(1));
}

TEST_F(SpikeDetectorTest, CrossingsWithinTenStepsAreOneEvent) {
  std::vector<double> rms(30, 1.0);
  rms[4] = rms[8] = 3;  // steps 5, 9
  rms[14] = 3;          // step 15, ten after the event
  EXPECT_THAT(RmsEvents(rms), ElementsAre(5, 15));
  rms[14] = 1;
  rms[13] = 3;  // step 14
  EXPECT_THAT(RmsEvents(rms), ElementsAre(5));
}

TEST_F(SpikeDetectorTest, WithAMarginAnEventIsAlsoFarAboveWhatIsUsualForTheLayer) {
  SpikeSettings settings = Settings(0);
  settings.rms_margin = 1.5;
  SpikeDetector detector(settings, {kThreshold, kThreshold});
  const auto at = [&](uint64_t step, double noisy, double quiet) {
    return detector.Observe({.step = step, .rms = {{.value = noisy}, {.value = quiet}}});
  };
  uint64_t step = 0;
  while (step < 63) EXPECT_THAT(at(++step, 9, 9), IsEmpty()) << "too little is known";
  for (++step; step <= 300; ++step) {
    EXPECT_THAT(at(step, step % 5 == 0 ? 4 : 1, 1), IsEmpty()) << "the first layer is always so";
  }
  EXPECT_THAT(at(step, 5.9, 2.2), IsEmpty()) << "under the margin, and under the threshold";
  const auto events = at(++step, 1, 3.4);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].layer, 1u);
  EXPECT_DOUBLE_EQ(events[0].threshold, 1.5 * 2.2);
  for (int i = 0; i < 20; ++i) at(++step, 1, 1);
  const auto higher = at(++step, 9, 1);
  ASSERT_EQ(higher.size(), 1u);
  EXPECT_EQ(higher[0].layer, 0u);
  EXPECT_DOUBLE_EQ(higher[0].threshold, 1.5 * 5.9);
}

TEST_F(SpikeDetectorTest, AStepThatWasNotAppliedIsNoPartOfWhatIsUsual) {
  SpikeSettings settings = Settings(0);
  settings.rms_margin = 1.5;
  SpikeDetector detector(settings, {kThreshold});
  uint64_t step = 0;
  while (step < 100) detector.Observe(Step(++step, 1));
  StepFindings skipped = Step(++step, 9);
  skipped.applied = false;
  EXPECT_EQ(detector.Observe(skipped).size(), 1u);
  EXPECT_EQ(detector.Foresee(Step(++step, 3)).size(), 1u);
}

TEST_F(SpikeDetectorTest, NothingIsFoundInTheWarmUpButWhatIsNotFinite) {
  EXPECT_THAT(RmsEvents({5, 5, 1, 5}, /*warmup=*/3), ElementsAre(4));
  SpikeDetector detector(Settings(3), {kThreshold});
  const auto events = detector.Observe({.step = 1, .nonfinite_tensors = 2, .first_nonfinite = 5});
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, SpikeKind::kNonfinite);
  EXPECT_EQ(events[0].tensor, 5u);
  EXPECT_EQ(events[0].value, 2);
  const auto bad_loss = detector.Observe({.step = 2, .loss = std::numeric_limits<double>::quiet_NaN()});
  ASSERT_EQ(bad_loss.size(), 1u);
  EXPECT_EQ(bad_loss[0].kind, SpikeKind::kLoss);
  EXPECT_TRUE(std::isnan(bad_loss[0].value));
  EXPECT_THAT(detector.Observe({.step = 3, .loss = std::numeric_limits<double>::infinity()}), IsEmpty()) << "the same";
}

TEST_F(SpikeDetectorTest, CurvatureIsHeldAgainstTheEdgeOfStability) {
  SpikeDetector detector(Settings(0), {kThreshold});
  EXPECT_THAT(detector.Observe({.step = 1, .rms = {{}}, .curvature = {{.value = 0.99}}}), IsEmpty());
  const auto events = detector.Observe({.step = 2, .rms = {{}}, .curvature = {{.value = 1.5, .tensor = 2}}});
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, SpikeKind::kCurvature);
  EXPECT_EQ(events[0].threshold, 1);
}

TEST_F(SpikeDetectorTest, AnOutlierOfTheNormDoesNotHideTheNext) {
  std::vector<double> series = With(Calm(64), 1e9);  // its limit is 1.5 + 6 * 0.5
  series.push_back(1e3);
  EXPECT_THAT(NormEvents(series), ElementsAre(65, 66));
  EXPECT_THAT(NormEvents(With(Calm(64), 4.4)), IsEmpty());
}

TEST_F(SpikeDetectorTest, ForeseesWhatIsHighAndChangesNothing) {
  SpikeDetector detector(Settings(0), {kThreshold});
  EXPECT_EQ(detector.Observe(Step(1, 3)).size(), 1u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(detector.Foresee(Step(2, 3)).size(), 1u) << "it was high before, and still is";
  }
  EXPECT_THAT(detector.Observe(Step(2, 3)), IsEmpty());
}

TEST_F(SpikeDetectorTest, ACopyGoesOnAsTheOriginal) {
  SpikeDetector detector(Settings(0), {kThreshold});
  for (uint64_t step = 1; step <= 100; ++step) {
    detector.Observe(
        {.step = step, .rms = {{.value = 1}}, .curvature = {{}}, .loss = 1.0 + 0.01 * static_cast<double>(step % 3)});
  }
  SpikeDetector copy = detector;
  for (uint64_t step = 101; step <= 140; ++step) {
    const StepFindings found{
        .step = step, .rms = {{.value = step % 13 == 0 ? 3 : 1}}, .curvature = {{}}, .loss = step % 7 == 0 ? 5 : 1};
    EXPECT_EQ(detector.Observe(found).size(), copy.Observe(found).size());
  }
  EXPECT_EQ(detector.score(SpikeKind::kRms).counts().hits, copy.score(SpikeKind::kRms).counts().hits);
}

TEST_F(SpikeDetectorTest, ALayerThatIsAddedIsWatchedBesideThoseThatWere) {
  SpikeDetector before(Settings(0), {kThreshold}), detector(Settings(0), {kThreshold, kThreshold});
  EXPECT_EQ(before.Observe(Step(1, 3)).size(), 1u);
  detector.GoBackTo(before);
  const std::vector<SpikeEvent> events =
      detector.Observe({.step = 2, .rms = {{.value = 3}, {.value = 3, .tensor = 1}}});
  ASSERT_EQ(events.size(), 1u) << "the first layer was high before";
  EXPECT_EQ(events[0].layer, 1u);
}

TEST_F(SpikeDetectorTest, ALayerThatIsGoneIsForgotten) {
  SpikeDetector before(Settings(0), {kThreshold, kThreshold}), detector(Settings(0), {kThreshold});
  before.Observe({.step = 1, .rms = {{}, {.value = 3}}});
  detector.GoBackTo(before);
  const std::vector<SpikeEvent> events = detector.Observe(Step(2, 3));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].layer, 0u);
}

TEST_F(SpikeDetectorTest, ScoresItsPredictorsAgainstTheLossSpikes) {
  SpikeDetector detector(Settings(0), {kThreshold});
  for (uint64_t step = 1; step <= 200; ++step) {
    StepFindings found = Step(step, step == 100 || step == 107 ? 3 : 1);
    const bool spikes = (step >= 105 && step < 112) || (step >= 150 && step < 160);
    found.loss = spikes ? 4 : 2 + 0.1 * static_cast<double>(step % 5);
    for (const SpikeEvent& event : detector.Observe(found)) {
      if (event.kind != SpikeKind::kLoss) continue;
      EXPECT_TRUE(event.since == 105 || event.since == 150);
      EXPECT_EQ(step, event.since + (event.since == 105 ? 4 : 5)) << "after a spike one more high loss is wanted";
    }
  }
  const SpikeScore::Counts& rms = detector.score(SpikeKind::kRms).counts();
  EXPECT_EQ(rms.hits, 1u);
  EXPECT_EQ(rms.misses, 1u);
  EXPECT_EQ(rms.leads[5], 1u);
  EXPECT_EQ(rms.false_alarms, 0u) << "the one in the spike is none";
  EXPECT_EQ(detector.score(SpikeKind::kCurvature).counts().misses, 2u);
}

TEST_F(SpikeDetectorTest, WhatComesAfterASpikesBeginForetellsNone) {
  SpikeDetector detector(Settings(0), {kThreshold});
  for (uint64_t step = 1; step <= 200; ++step) {
    StepFindings found = Step(step, step == 80 || step == 120 ? 3 : 1);
    found.loss = step >= 110 && step < 125 ? 4 : 2 + 0.1 * static_cast<double>(step % 5);
    for (const SpikeEvent& event : detector.Observe(found)) {
      if (event.kind != SpikeKind::kRms) continue;
      EXPECT_EQ(event.since, step == 120 ? 110u : 0u);
    }
  }
  EXPECT_EQ(detector.score(SpikeKind::kRms).counts().false_alarms, 1u) << "that of step 80";
}

}  // namespace
}  // namespace ballast
