// A step's statistics against sums in double over what was stored.
#include "kernels/statistics.h"

#include <gtest/gtest.h>

#include "tests/kernels/decoded.h"

namespace ballast::kernels {
namespace {

// Master words of an element, for "unchanged".
std::vector<std::byte> MasterWords(const Tensor& tensor, uint64_t i) {
  std::vector<std::byte> words;
  for (size_t p = 0; p < FindMaster(tensor.kernel().master)->planes.size(); ++p) {
    const uint32_t bytes = tensor.kernel().planes[p].bytes;
    words.insert(words.end(), tensor.plane(p) + i * bytes, tensor.plane(p) + (i + 1) * bytes);
  }
  return words;
}

// What the statistics of one update must be, given the tensor before and after it.
Statistics Expected(const Tensor& before, const Tensor& after, const std::vector<float>& grad, uint64_t t) {
  const oracle::AdamWHyper hyper = HyperOf(before.kernel(), DefaultHypers(before.kernel()));
  const DecodedSlot m = DecodeSlot(before, Kind::kMomentum), v = DecodeSlot(before, Kind::kVariance);
  const std::vector<float> weights = before.Weights(), stored = after.Weights();
  Statistics s{};
  for (uint64_t i = 0; i < before.size(); ++i) {
    const double g = static_cast<double>(grad[i]), x = static_cast<double>(weights[i]);
    oracle::AdamWState state{x, m.values[i], v.values[i]};
    const oracle::AdamWTerms terms = oracle::AdamWStep(hyper, g, t, &state);
    s.grad_sq += g * g;
    s.update_sq += terms.wanted * terms.wanted;
    s.rms_sq += terms.rms_term;
    s.grad_absmax = std::max(s.grad_absmax, std::abs(g));
    s.weight_sq += x * x;
    s.stored_dot += terms.wanted * (static_cast<double>(stored[i]) - x);
    s.unchanged += MasterWords(before, i) == MasterWords(after, i) ? 1 : 0;
  }
  if (before.kernel().state != std::string_view("fp32")) {
    s.saturated = DecodeSlot(after, Kind::kMomentum).saturated + DecodeSlot(after, Kind::kVariance).saturated;
  }
  return s;
}

TEST(StatisticsTest, AreTheSumsInDoubleOverWhatWasStored) {
  constexpr double kBound = 2e-5;  // fp32 terms of a few roundings and 24 additions deep, all of one sign
  for (const Kernel& kernel : Kernels()) {
    for (const bool stochastic : {false, true}) {
      for (const uint64_t n : {33ull, 4097ull, 12289ull}) {
        SCOPED_TRACE(NameOf(kernel) + (stochastic ? " stochastic " : " nearest ") + std::to_string(n));
        Normals random(n);
        Tensor tensor(kernel, n);
        tensor.SetWeights(random.Vector(n, 0.3));
        for (uint64_t t = 1; t <= 4; ++t) {
          const Tensor before = tensor;
          const std::vector<float> grad = random.Vector(n, 0.01);
          const Statistics got = Combine(tensor.Step(Encoded(0, grad), {.t = t, .stochastic = stochastic}), true);
          const Statistics wanted = Expected(before, tensor, grad, t);
          EXPECT_NEAR(got.grad_sq, wanted.grad_sq, wanted.grad_sq * kBound);
          EXPECT_NEAR(got.update_sq, wanted.update_sq, wanted.update_sq * kBound);
          EXPECT_NEAR(got.rms_sq, wanted.rms_sq, wanted.rms_sq * kBound);
          EXPECT_EQ(got.grad_absmax, wanted.grad_absmax);
          EXPECT_NEAR(got.weight_sq, wanted.weight_sq, wanted.weight_sq * kBound);
          EXPECT_NEAR(got.stored_dot, wanted.stored_dot, wanted.update_sq * 1e-4);
          EXPECT_EQ(got.unchanged, wanted.unchanged);
          EXPECT_EQ(got.saturated, wanted.saturated);
          EXPECT_EQ(got.nonfinite + got.rejected, 0u);
        }
      }
    }
  }
}

// A written-out form of the order: 16 rows of 256 lanes, then the tree, in fp32.
TEST(StatisticsTest, TheOrderOfSummingIsTheFixedOne) {
  const Kernel& kernel = *FindKernel("adamw", "fp32", "fp32");
  const std::vector<float> grad = Normals(8).Vector(kTile, 1);
  Tensor tensor(kernel, kTile);
  const TileStatistics got = tensor.Step(Encoded(0, grad), {})[0];
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
  tiles[1].unchanged = 5;
  const Statistics s = Combine(tiles, true);
  EXPECT_EQ(s.grad_sq, static_cast<double>(1e30f) + 1);
  EXPECT_EQ(s.grad_absmax, 7);
  EXPECT_EQ(s.nonfinite, 8000000000u);
  EXPECT_EQ(s.unchanged, 5u);
  EXPECT_TRUE(s.full);
}

// RMS_t of steady noise is 1 at any step, since vhat is bias-corrected.
TEST(StatisticsTest, RmsOfSteadyNoiseIsOneFromTheStart) {
  const Kernel& kernel = *FindKernel("adamw", "split24", "companded8");
  const std::vector<double> hyper = Hypers(kernel, {{"beta2", 0.9999}});
  Tensor tensor(kernel, kTile);
  Normals random(31);
  for (uint64_t t = 1; t <= 300; ++t) {
    const Statistics s = Combine(tensor.Step(Encoded(0, random.Vector(kTile)), {.hyper = hyper, .t = t}), true);
    if (t >= 50) {
      ASSERT_NEAR(std::sqrt(s.rms_sq / kTile), 1, 0.05) << t;
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
