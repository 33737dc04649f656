#include "server/stability/tensor_clip.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace ballast {
namespace {

// Algorithm 1 of arXiv 2502.11034 for one tensor, whole histories at a time, with the paper's names.
std::vector<double> Paper(const std::vector<double>& norms, double lambda_abs, double lambda_rel, double beta,
                          size_t t_start) {
  std::vector<double> h, gamma;
  for (size_t t = 0; t < norms.size(); ++t) {
    if (t < t_start) {
      h.push_back(std::min(lambda_abs / norms[t], 1.0));
      gamma.push_back(t == 0 ? h[t] * norms[t] : std::min(gamma[t - 1], h[t] * norms[t]));
    } else {
      h.push_back(std::min(lambda_rel * gamma[t - 1] / norms[t], 1.0));
      gamma.push_back(beta * gamma[t - 1] + (1 - beta) * h[t] * norms[t]);
    }
  }
  return h;
}

// About 0.5, with an outlier now and then.
std::vector<double> Norms(uint32_t seed, size_t count) {
  std::mt19937 random(seed);
  std::lognormal_distribution<double> usual(-0.7, 0.3);
  std::vector<double> norms(count);
  for (double& norm : norms) norm = usual(random) * (random() % 17 == 0 ? 40 : 1);
  return norms;
}

TEST(TensorClipTest, TheCoefficientsAreThePapers) {
  for (const uint64_t warmup : {uint64_t{1}, uint64_t{10}, uint64_t{100}}) {
    TensorClip clip({.absolute = 0.8, .relative = 1.1, .beta = 0.9, .warmup = warmup}, 3);
    std::vector<std::vector<double>> norms, wanted;
    for (uint32_t tensor = 0; tensor < 3; ++tensor) {
      norms.push_back(Norms(tensor + 1, 400));
      wanted.push_back(Paper(norms.back(), 0.8, 1.1, 0.9, warmup));
    }
    size_t clipped = 0;
    for (size_t t = 0; t < 400; ++t) {
      for (size_t tensor = 0; tensor < 3; ++tensor) {
        const double got = static_cast<double>(clip.Next(tensor, norms[tensor][t]));
        // The coefficient is rounded to fp32, and what was taken follows it.
        ASSERT_NEAR(got, wanted[tensor][t], 1e-6 * wanted[tensor][t]) << "tensor " << tensor << ", step " << t;
        clipped += got < 1 ? 1 : 0;
      }
    }
    EXPECT_GT(clipped, 60u);
    EXPECT_LT(clipped, 1200u);
  }
}

TEST(TensorClipTest, TheDefaultsAreThePapers) {
  constexpr TensorClip::Options kDefaults;
  EXPECT_EQ(kDefaults.absolute, 1.0);
  EXPECT_EQ(kDefaults.relative, 1.05);
  EXPECT_EQ(kDefaults.beta, 0.98);
  EXPECT_EQ(kDefaults.warmup, 100u);
}

TEST(TensorClipTest, AnOutlierIsHeldToTheAverageAndMovesItLittle) {
  TensorClip clip({.warmup = 5}, 1);
  for (int t = 0; t < 5; ++t) EXPECT_EQ(clip.Next(0, 0.5), 1);
  EXPECT_FLOAT_EQ(clip.Next(0, 1000), 1.05f * 0.5f / 1000);
  EXPECT_NEAR(clip.averages()[0].norm, 0.98 * 0.5 + 0.02 * 1.05 * 0.5, 1e-9);
  EXPECT_EQ(clip.Next(0, 0.5), 1);
}

TEST(TensorClipTest, ANormThatIsNotFiniteGivesZeroAndIsForgotten) {
  TensorClip clip({.warmup = 3}, 1);
  for (int t = 0; t < 5; ++t) {
    const auto before = clip.averages();
    EXPECT_EQ(clip.Next(0, HUGE_VAL), 0);
    EXPECT_EQ(clip.Next(0, std::numeric_limits<double>::quiet_NaN()), 0);
    EXPECT_EQ(clip.averages(), before);
    clip.Next(0, 0.25);
  }
  EXPECT_EQ(clip.averages()[0].steps, 5u);
}

// A tensor without gradients, at the start or for a while, is not held to nothing afterwards.
TEST(TensorClipTest, ANormOfZeroLeavesTheAverageAlone) {
  TensorClip clip({.warmup = 2}, 1);
  for (int t = 0; t < 10; ++t) EXPECT_EQ(clip.Next(0, 0), 1);
  EXPECT_EQ(clip.Next(0, 4), 0.25f);  // still its first step: the absolute limit
  EXPECT_EQ(clip.Next(0, 0.5), 1);
  for (int t = 0; t < 10; ++t) EXPECT_EQ(clip.Next(0, 0), 1);
  EXPECT_EQ(clip.averages()[0].norm, 0.5);
  EXPECT_EQ(clip.Next(0, 0.5), 1);
}

TEST(TensorClipTest, WithoutAWarmUpTheFirstNormIsHeldToTheAbsoluteLimit) {
  TensorClip clip({.warmup = 0}, 1);
  EXPECT_EQ(clip.Next(0, 2), 0.5f);
  EXPECT_FLOAT_EQ(clip.Next(0, 2), 1.05f / 2);
}

TEST(TensorClipTest, ACopyIsASnapshot) {
  TensorClip clip({.warmup = 10}, 2);
  const std::vector<double> norms = Norms(7, 60);
  for (size_t t = 0; t < 30; ++t) clip.Next(t % 2, norms[t]);
  TensorClip copy = clip, again({.warmup = 10}, 2);
  again.set_averages(clip.averages());
  for (size_t t = 30; t < 60; ++t) {
    const float wanted = clip.Next(t % 2, norms[t]);
    EXPECT_EQ(copy.Next(t % 2, norms[t]), wanted);
    EXPECT_EQ(again.Next(t % 2, norms[t]), wanted);
  }
}

}  // namespace
}  // namespace ballast
