// How statistics are summed and combined. What they sum is held against the oracle in step_test.cc.
#include <gtest/gtest.h>

#include "tests/kernels/decoded.h"

namespace ballast::kernels {
namespace {

// A written-out form of the order: 16 rows of 256 lanes, then the tree, in fp32.
TEST(StatisticsTest, TheOrderOfSummingIsTheFixedOne) {
  const Kernel& kernel = *FindKernel("adamw", "fp32", "fp32");
  const std::vector<float> grad = Normals(8).Vector(kTile, 1);
  Tensor tensor(kernel, kTile);
  const TileStatistics got = tensor.Step(Encoded(FindWireFormat("fp32"), grad), {})[0];
  std::vector<float> sums(256);
  for (size_t row = 0; row < 16; ++row) {
    for (size_t lane = 0; lane < 256; ++lane) {
      const float g = grad[row * 256 + lane], square = g * g;
      sums[lane] += square;
    }
  }
  for (size_t stride = 1; stride < 256; stride *= 2) {
    for (size_t lane = 0; lane < 256; lane += 2 * stride) sums[lane] += sums[lane + stride];
  }
  EXPECT_EQ(got.grad_sq, sums[0]);
}

TEST(StatisticsTest, TilesAreCombinedInOrderInDouble) {
  std::vector<TileStatistics> tiles(3);
  tiles[0].grad_sq = 1e30f, tiles[1].grad_sq = 1, tiles[2].grad_absmax = 7;
  tiles[0].nonfinite = tiles[1].nonfinite = 4000000000u;
  tiles[1].unchanged = 5, tiles[2].hi_unchanged = 6, tiles[0].saturated = 7, tiles[1].rejected = 8;
  tiles[0].hi_dot = 2, tiles[1].hi_dot = -0.5f, tiles[2].stored_dot = 3, tiles[2].weight_sq = 4;
  const Statistics s = Combine(tiles, true);
  EXPECT_EQ(s.grad_sq, static_cast<double>(1e30f) + 1);
  EXPECT_EQ(s.grad_absmax, 7);
  EXPECT_EQ(s.nonfinite, 8000000000u);
  EXPECT_EQ(s.unchanged, 5u);
  EXPECT_EQ(s.hi_unchanged, 6u);
  EXPECT_EQ(s.saturated, 7u);
  EXPECT_EQ(s.rejected, 8u);
  EXPECT_EQ(s.hi_dot, 1.5);
  EXPECT_EQ(s.stored_dot, 3);
  EXPECT_EQ(s.weight_sq, 4);
  EXPECT_TRUE(s.full);
}

// RMS_t of steady noise is 1 at any step, since vhat is bias-corrected.
TEST(StatisticsTest, RmsOfSteadyNoiseIsOneFromTheStart) {
  const Kernel& kernel = *FindKernel("adamw", "split24", "companded8");
  const std::vector<double> hyper = Hypers(kernel, {{"beta2", 0.9999}});
  Tensor tensor(kernel, kTile);
  Normals random(31);
  for (uint64_t t = 1; t <= 300; ++t) {
    const Statistics s =
        Combine(tensor.Step(Encoded(FindWireFormat("fp32"), random.Vector(kTile)), {.hyper = hyper, .t = t}), true);
    if (t >= 50) {
      ASSERT_NEAR(std::sqrt(s.rms_sq / kTile), 1, 0.05) << t;
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
