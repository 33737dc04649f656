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
  for (uint64_t t = 1; t <= 2; ++t) tensor.Step(Encoded(0, random.Vector(kElements, 0.01)), {.t = t});
  return tensor;
}

// The bytes of one block in every plane.
std::vector<std::byte> BlockBytes(const Tensor& tensor, uint64_t block) {
  std::vector<std::byte> bytes;
  for (size_t p = 0; p < tensor.kernel().planes.size(); ++p) {
    const Plane& plane = tensor.kernel().planes[p];
    const uint64_t size = kBlock / plane.per * plane.bytes;
    bytes.insert(bytes.end(), tensor.plane(p) + block * size, tensor.plane(p) + (block + 1) * size);
  }
  return bytes;
}

// Steps a tensor with `bad` in the gradient at `places` and expects exactly their blocks to be refused.
void ExpectRefused(const Kernel& kernel, const Payload& clean, const Payload& poisoned,
                   const std::set<uint64_t>& places, bool finite) {
  Tensor healthy = Trained(kernel), tensor = Trained(kernel);
  const Tensor before = tensor;
  healthy.Step(clean, {.t = 3});
  const Statistics s = Combine(tensor.Step(poisoned, {.t = 3}), true);
  std::set<uint64_t> blocks;
  for (const uint64_t place : places) blocks.insert(place / kBlock);
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
    for (const WireFormat& wire : WireFormats()) {
      const WireIndex format = FindWireFormat(wire.name);
      std::vector<float> grad = Normals(2).Vector(kElements, 0.01);
      const Payload clean = Encoded(format, grad);
      for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
        SCOPED_TRACE(NameOf(kernel) + " " + wire.name + " " + std::to_string(bad));
        for (const uint64_t place : places) grad[place] = bad;
        ExpectRefused(kernel, clean, Encoded(format, grad), places, false);
      }
    }
  }
}

// 1e30 squared is no fp32 number; 2^118 and more overflow v too.
TEST(RejectionTest, GradientsTooLargeToSquareAreRefusedButAreFinite) {
  const std::set<uint64_t> places = {33, 64, 2 * kTile, kElements - 2};
  for (const Kernel& kernel : Kernels()) {
    for (const float bad : {1e30f, -1e30f, 3e38f}) {
      SCOPED_TRACE(NameOf(kernel));
      std::vector<float> grad = Normals(2).Vector(kElements, 0.01);
      const Payload clean = Encoded(0, grad);
      for (const uint64_t place : places) grad[place] = bad;
      ExpectRefused(kernel, clean, Encoded(0, grad), places, true);
    }
  }
}

TEST(RejectionTest, AScaledGradientThatOverflowsIsNotFinite) {
  for (const Kernel& kernel : Kernels()) {
    Tensor tensor(kernel, 64);
    std::vector<float> grad(64, 1e-20f);
    grad[40] = 1e20f;
    const TileStatistics s = tensor.Step(Encoded(0, grad), {.grad_scale = 1e20f})[0];
    EXPECT_EQ(s.nonfinite, 1u);
    EXPECT_EQ(s.rejected, 1u);
  }
}

TEST(RejectionTest, AnInfiniteScaleCountsElementsOfTheTensorAlone) {
  for (const Kernel& kernel : Kernels()) {
    Tensor tensor(kernel, 33);
    const std::vector<std::byte> before = tensor.Bytes();
    const TileStatistics s = tensor.Step(Encoded(0, std::vector<float>(33, 1.0f)), {.grad_scale = INFINITY})[0];
    EXPECT_EQ(s.nonfinite, 33u) << NameOf(kernel);
    EXPECT_EQ(s.rejected, 2u);
    EXPECT_EQ(tensor.Bytes(), before);
  }
}

TEST(RejectionTest, WeightsBeyondTwoToThe119AreRefused) {
  const float limit = 0x1p119f, above = std::bit_cast<float>(std::bit_cast<uint32_t>(limit) + 0x8000);
  for (const Kernel& kernel : Kernels()) {
    SCOPED_TRACE(NameOf(kernel));
    const StepOptions options{.hyper = Hypers(kernel, {{"lr", 0}}), .stochastic = false};
    std::vector<float> weights(96, 1.0f);
    weights[3] = limit;
    weights[40] = -above;
    Tensor tensor(kernel, 96);
    tensor.SetWeights(weights);
    const TileStatistics s = tensor.Step(Encoded(0, std::vector<float>(96, 1.0f)), options)[0];
    EXPECT_EQ(s.rejected, 1u);
    EXPECT_EQ(s.nonfinite, 0u);
    const DecodedSlot m = DecodeSlot(tensor, Kind::kMomentum);
    EXPECT_NE(m.values[0], 0);
    EXPECT_EQ(m.values[40], 0);
    EXPECT_NE(m.values[64], 0);
  }
}

// The contract of TileStatistics: the largest over finite gradients, refused or not.
TEST(RejectionTest, TheLargestGradientIsOverAllFiniteOnes) {
  for (const Kernel& kernel : Kernels()) {
    SCOPED_TRACE(NameOf(kernel));
    std::vector<float> grad(96, 1.0f);
    grad[5] = NAN;
    grad[6] = -3.0f;
    EXPECT_EQ(Tensor(kernel, 96).Step(Encoded(0, grad), {})[0].grad_absmax, 3.0f);
    grad[70] = 1e30f;
    EXPECT_EQ(Tensor(kernel, 96).Step(Encoded(0, grad), {})[0].grad_absmax, 1e30f);
  }
}

}  // namespace
}  // namespace ballast::kernels
