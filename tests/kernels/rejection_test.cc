// A gradient or a result that is not a number of sane size leaves its block as it was, is counted, and touches nothing
// else.
#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "tests/kernels/decoded.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 4 * kTile + 45;

// A fresh tensor that has had two quiet steps.
Tensor Trained(const Kernel& kernel) {
  Tensor tensor(kernel, kElements);
  Normals random(1);
  tensor.SetWeights(random.Vector(kElements, 0.1));
  for (uint64_t t = 1; t <= 2; ++t)
    tensor.Step(Encoded(FindWireFormat("fp32"), random.Vector(kElements, 0.01)), {.t = t});
  return tensor;
}

// The bytes of one block in every plane.
std::vector<std::byte> BlockBytes(const Tensor& tensor, uint64_t block) {
  std::vector<std::byte> bytes;
  for (size_t p = 0; p < tensor.kernel().planes.size(); ++p) {
    const Plane& plane = tensor.kernel().planes[p];
    const uint64_t size = std::max<uint64_t>(kBlock / plane.per, 1) * plane.bytes;
    const std::byte* at = tensor.plane(p) + block * kBlock / plane.per * plane.bytes;
    bytes.insert(bytes.end(), at, at + size);
  }
  return bytes;
}

// The blocks of a tensor that go down with an element: its own, and those that share its scale.
std::set<uint64_t> BlocksOf(const Kernel& kernel, uint64_t n, const std::set<uint64_t>& places) {
  uint64_t shared = kBlock;
  for (const Plane& plane : kernel.planes) shared = std::max<uint64_t>(shared, plane.per);
  std::set<uint64_t> blocks;
  for (const uint64_t place : places) {
    const uint64_t first = place / shared * shared;
    for (uint64_t e = first; e < std::min(n, first + shared); e += kBlock) blocks.insert(e / kBlock);
  }
  return blocks;
}

// A quiet gradient, so that StableAdamW's first pass asks for no smaller lr, with or without some blocks.
std::vector<float> Quiet() { return Normals(2).Vector(kElements, 0.001); }

// Steps a tensor with `bad` in the gradient at `places` and expects exactly their blocks to be refused.
void ExpectRefused(const Kernel& kernel, const Payload& clean, const Payload& poisoned,
                   const std::set<uint64_t>& places, bool finite) {
  Tensor healthy = Trained(kernel), tensor = Trained(kernel);
  const Tensor before = tensor;
  healthy.Step(clean, {.t = 3});
  const Statistics s = Combine(tensor.Step(poisoned, {.t = 3}), true);
  const std::set<uint64_t> blocks = BlocksOf(kernel, kElements, places);
  EXPECT_EQ(s.rejected, blocks.size());
  EXPECT_EQ(s.nonfinite, finite ? 0 : places.size());
  for (const double sum : {s.grad_sq, s.update_sq, s.rms_sq, s.weight_sq, s.stored_dot, s.grad_absmax}) {
    EXPECT_TRUE(std::isfinite(sum));
  }
  for (uint64_t block = 0; block < (kElements + kBlock - 1) / kBlock; ++block) {
    const Tensor& wanted = blocks.contains(block) ? before : healthy;
    ASSERT_EQ(BlockBytes(tensor, block), BlockBytes(wanted, block)) << block;
  }
}

TEST(RejectionTest, GradientsThatAreNotFiniteChangeNoBitOfTheirBlocks) {
  const std::set<uint64_t> places = {0, 1, 31, 100, kTile - 1, kTile, 3 * kTile + 5, kElements - 1};
  for (const Kernel& kernel : Kernels()) {
    for (const WireIndex format : GradientFormats()) {
      std::vector<float> grad = Quiet();
      const Payload clean = Encoded(format, grad);
      for (const float bad : {NAN, -INFINITY}) {
        SCOPED_TRACE(NameOf(kernel) + " " + NameOf(format) + " " + std::to_string(bad));
        for (const uint64_t place : places) grad[place] = bad;
        ExpectRefused(kernel, clean, Encoded(format, grad), places, false);
      }
    }
  }
}

// 1e30 squared is no fp32 number; 3e38 is above 2^119, for rules without a v.
TEST(RejectionTest, GradientsTooLargeToSquareAreRefusedButAreFinite) {
  const std::set<uint64_t> places = {33, 64, 2 * kTile, kElements - 2};
  for (const Kernel& kernel : Kernels()) {
    for (const float bad : {1e30f, -1e30f, 3e38f}) {
      if (!kernel.has_rms && std::abs(bad) < 1e31f) continue;
      SCOPED_TRACE(NameOf(kernel));
      std::vector<float> grad = Quiet();
      const Payload clean = Encoded(FindWireFormat("fp32"), grad);
      for (const uint64_t place : places) grad[place] = bad;
      ExpectRefused(kernel, clean, Encoded(FindWireFormat("fp32"), grad), places, true);
    }
  }
}

TEST(RejectionTest, AScaledGradientThatOverflowsIsNotFinite) {
  for (const Kernel& kernel : Kernels()) {
    Tensor tensor(kernel, 64);
    std::vector<float> grad(64, 1e-20f);
    grad[40] = 1e20f;
    const TileStatistics s = tensor.Step(Encoded(FindWireFormat("fp32"), grad), {.grad_scale = 1e20f})[0];
    EXPECT_EQ(s.nonfinite, 1u);
    EXPECT_EQ(s.rejected, BlocksOf(kernel, 64, {40}).size());
  }
}

TEST(RejectionTest, AnInfiniteScaleCountsElementsOfTheTensorAlone) {
  for (const Kernel& kernel : Kernels()) {
    Tensor tensor(kernel, 33);
    const std::vector<std::byte> before = tensor.Bytes();
    const TileStatistics s =
        tensor.Step(Encoded(FindWireFormat("fp32"), std::vector<float>(33, 1.0f)), {.grad_scale = INFINITY})[0];
    EXPECT_EQ(s.nonfinite, 33u) << NameOf(kernel);
    EXPECT_EQ(s.rejected, 2u);
    EXPECT_EQ(tensor.Bytes(), before);
  }
}

TEST(RejectionTest, WeightsBeyondTwoToThe119AreRefused) {
  const float limit = 0x1p119f, above = std::bit_cast<float>(std::bit_cast<uint32_t>(limit) + 0x10000);
  for (const Kernel& kernel : Kernels()) {
    if (kernel.master == std::string_view("mcf8")) continue;  // has no such weights
    SCOPED_TRACE(NameOf(kernel));
    const StepOptions options{.hyper = Hypers(kernel, {{"lr", 0}}), .stochastic = false};
    std::vector<float> weights(768, 1.0f);
    weights[3] = limit;
    weights[300] = -above;
    Tensor tensor(kernel, 768);
    tensor.SetWeights(weights);
    const Payload grad = Encoded(FindWireFormat("fp32"), std::vector<float>(768, 1.0f));
    const TileStatistics s = tensor.Step(grad, options)[0];
    EXPECT_EQ(s.rejected, BlocksOf(kernel, 768, {300}).size());
    EXPECT_EQ(s.nonfinite, 0u);
    const DecodedMoment m = DecodeMoment(tensor, PlaneKind::kMomentum);
    EXPECT_NE(m.values[0], 0);
    EXPECT_EQ(m.values[300], 0);
    EXPECT_NE(m.values[600], 0);
  }
}

TEST(RejectionTest, WeightsBeyondTheLargestOfMcf8AreRefused) {
  const Kernel& kernel = *FindKernel("adamw", "mcf8", "fp32");
  const StepOptions options{.hyper = Hypers(kernel, {{"lr", 1e4}, {"weight_decay", 0}}), .stochastic = false};
  std::vector<float> weights(96, 1.0f);
  weights[3] = 50000;  // goes to 40000, within a spacing of 8192
  weights[40] = -50000;
  Tensor tensor(kernel, 96);
  tensor.SetWeights(weights);
  const std::vector<float> before = tensor.Weights();
  const TileStatistics s = tensor.Step(Encoded(FindWireFormat("fp32"), std::vector<float>(96, 1.0f)), options)[0];
  EXPECT_EQ(s.rejected, 1u);
  const std::vector<float> after = tensor.Weights();
  EXPECT_NEAR(after[3], before[3] - 1e4f, 4096);
  EXPECT_EQ(after[40], before[40]);
  EXPECT_EQ(after[33], 1.0f) << "of the same block";
}

// flash8's fp16 scale: 65520 would be infinite.
TEST(RejectionTest, AScaleThatFp16DoesNotHaveIsRefusedAndTheOneBelowIsNot) {
  const Kernel& kernel = *FindKernel("adamw", "fp32", "flash8");
  const StepOptions options{.hyper = Hypers(kernel, {{"beta1", 0}, {"beta2", 0.999}})};
  for (const auto& [g, refused] : {std::pair<float, bool>{65519.0f, false}, {65520.0f, true}, {1e6f, true}}) {
    Tensor tensor(kernel, 64);
    const TileStatistics s = tensor.Step(Encoded(FindWireFormat("fp32"), std::vector<float>(64, g)), options)[0];
    EXPECT_EQ(s.rejected, refused ? 2u : 0u) << g;
    EXPECT_EQ(DecodeMoment(tensor, PlaneKind::kMomentum).values[0], refused ? 0 : 65504) << g;
  }
}

// Whatever is accepted decodes to numbers that the next step accepts: no block is lost for good.
TEST(RejectionTest, WhatIsAcceptedPoisonsNothing) {
  constexpr uint64_t kN = 96 * 256;
  for (const Kernel& kernel : Kernels()) {
    for (const bool stochastic : {false, true}) {
      SCOPED_TRACE(NameOf(kernel));
      std::vector<float> grad(kN);
      for (uint64_t i = 0; i < kN; ++i) {
        const int exponent = static_cast<int>(i / 256) + 31;
        grad[i] = std::min(std::ldexp(1.0f + static_cast<float>(i % 256) / 256, exponent), 0x1.fffffep63f);
      }
      for (uint64_t i = kN - 1024; i < kN; ++i)
        grad[i] = std::bit_cast<float>(0x5f7fffffu - static_cast<uint32_t>(i % 256));
      StepOptions options{.hyper = Hypers(kernel, {{"beta1", 0}, {"beta2", 0}, {"lr", 0}}), .stochastic = stochastic};
      Tensor tensor(kernel, kN);
      tensor.Step(Encoded(FindWireFormat("fp32"), grad), options);
      options.t = 2;
      const Payload zero = Encoded(FindWireFormat("fp32"), std::vector<float>(kN, 0.0f));
      EXPECT_EQ(Combine(tensor.Step(zero, options), true).rejected, 0u);
    }
  }
}

// The contract of TileStatistics: the largest over finite gradients, refused or not.
TEST(RejectionTest, TheLargestGradientIsOverAllFiniteOnes) {
  for (const Kernel& kernel : Kernels()) {
    SCOPED_TRACE(NameOf(kernel));
    std::vector<float> grad(96, 1.0f);
    grad[5] = NAN;
    grad[6] = -3.0f;
    EXPECT_EQ(Tensor(kernel, 96).Step(Encoded(FindWireFormat("fp32"), grad), {})[0].grad_absmax, 3.0f);
    grad[70] = 1e30f;
    EXPECT_EQ(Tensor(kernel, 96).Step(Encoded(FindWireFormat("fp32"), grad), {})[0].grad_absmax, 1e30f);
  }
}

}  // namespace
}  // namespace ballast::kernels
