// How often noise alone is taken for a loss spike, in many thousand drawn losses.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "server/stability/loss_watch.h"

namespace ballast {
namespace {

size_t SpikesIn(const std::vector<double>& losses) {
  LossWatch watch(3.2);
  size_t found = 0;
  for (uint64_t step = 1; step <= losses.size(); ++step)
    found += watch.Observe(step, losses[step - 1], true).has_value();
  return found;
}

TEST(LossWatch, NormalNoiseHasNoSpikeInAHundredThousandSteps) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal(2, 0.2);
  std::vector<double> losses(100000);
  for (double& loss : losses) loss = normal(random);
  EXPECT_EQ(SpikesIn(losses), 0u);
}

// `share` of the losses, at random, are from `hard`, the others from `easy`: normal(mean, deviation).
size_t SpikesOfMixture(double share, std::normal_distribution<double> easy, std::normal_distribution<double> hard) {
  std::mt19937_64 random(11);
  std::bernoulli_distribution is_hard(share);
  std::vector<double> losses(30000);
  for (double& loss : losses) loss = is_hard(random) ? hard(random) : easy(random);
  return SpikesIn(losses);
}

TEST(LossWatch, BatchesOfWhichSomeAreHarderHaveHardlyASpike) {
  const std::normal_distribution<double> easy(2, 0.1), hard(3, 0.1), zero(0, 1e-12), wide(0, 0.05);
  for (const double share : {0.05, 0.1, 0.15, 0.2, 0.3, 0.5}) {
    EXPECT_LE(SpikesOfMixture(share, easy, hard), 3u) << share << " of the batches; at most 1 in 10,000 steps";
  }
  EXPECT_LE(SpikesOfMixture(0.55, zero, wide), 3u) << "as where an advantage is often 0";
}

}  // namespace
}  // namespace ballast
