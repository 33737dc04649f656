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
  // The steps, from 1 on, with an event of that kind, of a series of losses or norms.
  static std::vector<uint64_t> SeriesEvents(const std::vector<double>& series, SpikeKind kind) {
    SpikeDetector detector(Settings(0), {});
    std::vector<uint64_t> steps;
    for (uint64_t i = 0; i < series.size(); ++i) {
      StepFindings found{.step = i + 1};
      (kind == SpikeKind::kLoss ? found.loss : found.grad_norm) = series[i];
      for (const SpikeEvent& e : detector.Observe(found)) {
        EXPECT_EQ(e.kind, kind);
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

TEST_F(SpikeDetectorTest, ALossIsHeldAgainstTheWindow) {
  // Its limit is 1.5 + 3.2 * 0.5.
  EXPECT_THAT(SeriesEvents(With(Calm(64), 3.2), SpikeKind::kLoss), ElementsAre(65));
  EXPECT_THAT(SeriesEvents(With(Calm(64), 3.0), SpikeKind::kLoss), IsEmpty());
  EXPECT_THAT(SeriesEvents(With(Calm(63), 99), SpikeKind::kLoss), IsEmpty()) << "half a window is not there yet";
}

TEST_F(SpikeDetectorTest, OnlyTheLast128LossesCount) {
  std::vector<double> series(200, 100.0);
  for (const double loss : Calm(128)) series.push_back(loss);
  EXPECT_THAT(SeriesEvents(With(series, 3.2), SpikeKind::kLoss), ElementsAre(329));
}

TEST_F(SpikeDetectorTest, LossesThatStayHighAreOneSpike) {
  std::vector<double> series = Calm(128);
  for (int i = 0; i < 5; ++i) series.push_back(50);
  for (const double loss : Calm(4)) series.push_back(loss);
  series.push_back(1000);  // five steps after the last high one
  EXPECT_THAT(SeriesEvents(series, SpikeKind::kLoss), ElementsAre(129));
}

TEST_F(SpikeDetectorTest, ALossThatIsNotFiniteIsASpikeAndSpoilsNoWindow) {
  std::vector<double> series = With(Calm(64), std::numeric_limits<double>::quiet_NaN());
  for (const double loss : Calm(20)) series.push_back(loss);
  series.push_back(3.2);
  EXPECT_THAT(SeriesEvents(series, SpikeKind::kLoss), ElementsAre(65, 86));
  EXPECT_THAT(SeriesEvents({std::numeric_limits<double>::infinity()}, SpikeKind::kLoss), ElementsAre(1));
}

TEST_F(SpikeDetectorTest, AnOutlierOfTheNormDoesNotHideTheNext) {
  std::vector<double> series = With(Calm(64), 1e9);  // its limit is 1.5 + 6 * 0.5
  series.push_back(1e3);
  EXPECT_THAT(SeriesEvents(series, SpikeKind::kGradientNorm), ElementsAre(65, 66));
  EXPECT_THAT(SeriesEvents(With(Calm(64), 4.4), SpikeKind::kGradientNorm), IsEmpty());
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
    StepFindings found = Step(step, step == 100 ? 3 : 1);
    found.loss = step == 105 || step == 150 ? 9 : 1 + 0.1 * static_cast<double>(step % 2);
    detector.Observe(found);
  }
  const SpikeScore::Counts& rms = detector.score(SpikeKind::kRms).counts();
  EXPECT_EQ(rms.hits, 1u);
  EXPECT_EQ(rms.misses, 1u);
  EXPECT_EQ(rms.leads[5], 1u);
  EXPECT_EQ(rms.false_alarms, 0u);
  EXPECT_DOUBLE_EQ(rms.chance(), 8.0 / 200);
  EXPECT_EQ(detector.score(SpikeKind::kCurvature).counts().misses, 2u);
}

}  // namespace
}  // namespace ballast
