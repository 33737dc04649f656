// What is a loss spike, and what is noise.
#include "server/stability/loss_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr double kSigmas = 3.2, kNan = std::numeric_limits<double>::quiet_NaN();
// The usual losses have a median of 2 and a spread of .148: 3.2 of them are at 2.47, 2 at 2.3, 16 at 4.37.
constexpr double kHigh = 2.6, kLow = 2.35, kHuge = 4.5;

// (the spike's first step, the one that makes it known) of each.
using Spikes = std::vector<std::pair<uint64_t, uint64_t>>;
Spikes SpikesIn(const std::vector<double>& losses, uint64_t warmup = 0) {
  LossWatch watch(kSigmas);
  Spikes found;
  for (uint64_t step = 1; step <= losses.size(); ++step) {
    if (const auto spike = watch.Observe(step, losses[step - 1], step > warmup)) found.emplace_back(spike->since, step);
  }
  return found;
}

class Losses {
 public:
  // 1.8, 1.9, 2, 2.1, 2.2, 1.8, ...
  Losses& Usual(int steps) {
    for (int i = 0; i < steps; ++i) all_.push_back(1.8 + 0.1 * static_cast<double>(i % 5));
    return *this;
  }
  Losses& Of(double loss, int steps = 1) {
    all_.insert(all_.end(), static_cast<size_t>(steps), loss);
    return *this;
  }
  operator const std::vector<double>&() const { return all_; }  // NOLINT: it is one

 private:
  std::vector<double> all_;
};

TEST(LossWatch, ASingleHighLossIsNoise) {
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh).Usual(50).Of(4.2).Usual(50)), IsEmpty());
}

TEST(LossWatch, HalfOfTenLossesHighAreASpikeFromTheFirstOn) {
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh).Of(kLow, 4).Usual(50)), ElementsAre(Pair(101, 105)));
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh).Usual(5).Of(kLow, 4).Usual(50)), ElementsAre(Pair(101, 110)));
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh).Usual(6).Of(kLow, 3).Usual(50)), IsEmpty());
}

TEST(LossWatch, NoSpikeBeginsWithALossThatIsOnlyLow) {
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kLow, 20).Usual(50)), IsEmpty());
}

TEST(LossWatch, AHugeLossIsOneAtOnce) {
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHuge).Usual(50)), ElementsAre(Pair(101, 101)));
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh).Of(kHuge).Usual(50)), ElementsAre(Pair(101, 102)));
}

TEST(LossWatch, ALossThatIsNotFiniteIsOneAtOnceInTheWarmUpToo) {
  EXPECT_THAT(SpikesIn(Losses().Of(kNan), /*warmup=*/100), ElementsAre(Pair(1, 1)));
  EXPECT_THAT(SpikesIn(Losses().Of(2).Of(kNan, 50).Of(2, 4).Of(kNan), 100), ElementsAre(Pair(2, 2))) << "the same one";
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh).Of(kNan).Usual(20)), ElementsAre(Pair(101, 102)));
}

TEST(LossWatch, NothingElseIsOneInTheWarmUpOrBeforeHalfAWindow) {
  EXPECT_THAT(SpikesIn(Losses().Usual(80).Of(kHuge, 9).Usual(80), /*warmup=*/100), IsEmpty());
  EXPECT_THAT(SpikesIn(Losses().Usual(63).Of(kHuge).Usual(80)), IsEmpty());
}

TEST(LossWatch, TenCalmLossesEndASpike) {
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh, 5).Usual(9).Of(kHuge).Usual(50)), ElementsAre(Pair(101, 105)));
  EXPECT_THAT(SpikesIn(Losses().Usual(100).Of(kHigh, 5).Usual(10).Of(kHuge).Usual(50)),
              ElementsAre(Pair(101, 105), Pair(116, 116)));
}

TEST(LossWatch, ASpikeDoesNotHideTheNext) {
  EXPECT_THAT(SpikesIn(Losses().Usual(128).Of(1000, 5).Usual(20).Of(kHigh, 6).Usual(20)),
              ElementsAre(Pair(129, 129), Pair(154, 159)))
      << "one more than usual, since the window has some that are high";
}

TEST(LossWatch, ATrainingThatStaysWorseIsOneSpikeAndGoesOn) {
  Losses losses = Losses().Usual(128);
  for (int i = 0; i < 300; ++i) losses.Of(10 + 0.1 * static_cast<double>(i % 5));
  losses.Of(13, 6);
  EXPECT_THAT(SpikesIn(losses), ElementsAre(Pair(129, 129), Pair(429, 429)));
}

TEST(LossWatch, LossesThatHardlyDifferHaveNoSpike) {
  EXPECT_THAT(SpikesIn(Losses().Of(2, 200).Of(2.005, 50)), IsEmpty()) << "under 3.2 thousandths";
}

TEST(LossWatch, AfterNothingButZerosWhateverIsAboveThemIsASpike) {
  EXPECT_THAT(SpikesIn(Losses().Of(0, 200)), IsEmpty());
  EXPECT_THAT(SpikesIn(Losses().Of(0, 200).Of(1e6, 59)), ElementsAre(Pair(201, 201)));
}

TEST(LossWatch, ASpikeAmongHarderBatchesIsFound) {
  std::mt19937_64 random(11);
  std::normal_distribution<double> normal(0, 0.1);
  Losses losses;
  for (int i = 0; i < 300; ++i) losses.Of((i % 5 == 0 ? 3 : 2) + normal(random));
  EXPECT_THAT(SpikesIn(Losses(losses).Of(3, 10)), ElementsAre(Pair(301, 309))) << "a fifth are hard: nine of ten";
  EXPECT_THAT(SpikesIn(Losses(losses).Of(9)), ElementsAre(Pair(301, 301)));
}

TEST(LossWatch, ForeseesWhatBelongsToASpikeAndChangesNothing) {
  LossWatch watch(kSigmas);
  uint64_t step = 0;
  const std::vector<double> usual = Losses().Usual(100);
  for (const double loss : usual) watch.Observe(++step, loss, true);
  EXPECT_FALSE(watch.Foresee(101, kHigh, true)) << "it may be noise";
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(watch.Foresee(101, kHuge, true));
  watch.Observe(101, kHuge, true);
  EXPECT_EQ(watch.spike_since(), 101u);
  const auto goes_on = watch.Foresee(102, kHigh, true);
  ASSERT_TRUE(goes_on);
  EXPECT_EQ(goes_on->since, 101u);
  EXPECT_EQ(goes_on->loss, kHuge) << "that of its first step";
  EXPECT_FALSE(watch.Foresee(102, 2, true));
}

}  // namespace
}  // namespace ballast
