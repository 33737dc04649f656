// The optimiser changes no bit: every kernel against itself compiled without optimisation.
#include <gtest/gtest.h>

#include <bit>

#include "tests/kernels/tensor.h"
#include "tests/kernels/unoptimized_kernels.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 3 * kTile + 1000;

const Kernel& RegisteredFor(const UnoptimizedKernel& k) { return *FindKernel(k.rule, k.master, k.state); }

// Finite patterns of every size up to 2^100, zeros, subnormals and ties. One block in sixteen gets any pattern at all.
std::vector<float> Adversarial(uint64_t seed, uint64_t n) {
  Normals random(seed);
  std::vector<float> values(n);
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t word = static_cast<uint32_t>(random.Word());
    // Each block has an exponent of its own, and its elements reach 24 powers of two below.
    const uint32_t largest = 2 + static_cast<uint32_t>((i / kBlock + seed) * 0x9E3779B97F4A7C15ull >> 33) % 180;
    const uint32_t exponent = largest - std::min(largest, word >> 3 & 0x1f);
    uint32_t bits = (word & 0x80000000u) | exponent << 23 | (word >> 8 & 0x7fffff);
    if (word % 16 == 0) bits &= 0xff808000;  // few digits: ties
    if (word % 19 == 0) bits &= 0x80000000;
    if (i / kBlock % 16 == 5) bits = static_cast<uint32_t>(random.Word());
    values[i] = std::bit_cast<float>(bits);
  }
  return values;
}

struct Outcome {
  uint64_t blocks = 0, rejected = 0;
};

// Runs both kernels side by side, with the gradients that `gradient(t)` gives.
template <class Gradient>
Outcome ExpectSameBits(const UnoptimizedKernel& slow, bool stochastic, double weight_scale, Gradient gradient) {
  const Kernel& fast = RegisteredFor(slow);
  Tensor a(fast, kElements);
  a.SetWeights(Normals(1).Vector(kElements, weight_scale));
  Tensor b = a;
  Outcome outcome;
  for (uint64_t t = 1; t <= 5; ++t) {
    const Payload grad = gradient(t);
    const StepOptions options{.t = t, .stochastic = stochastic};
    const std::vector<TileStatistics> wanted = a.Step(grad, options);
    std::vector<TileStatistics> got(b.tiles());
    slow.update(b.MakeUpdate(grad, options), 0, b.tiles(), got.data());
    EXPECT_EQ(std::memcmp(wanted.data(), got.data(), got.size() * sizeof got[0]), 0) << "statistics, step " << t;
    EXPECT_TRUE(a.Bytes() == b.Bytes()) << "planes, step " << t;
    outcome.blocks += (kElements + kBlock - 1) / kBlock;
    for (const TileStatistics& s : got) outcome.rejected += s.rejected;
  }
  return outcome;
}

TEST(IdentityTest, EveryRegisteredKernelHasAnUnoptimizedTwinOfItsOwn) {
  EXPECT_EQ(UnoptimizedKernels().size(), Kernels().size());
  for (const Kernel& kernel : Kernels()) {
    int twins = 0;
    for (const UnoptimizedKernel& slow : UnoptimizedKernels()) {
      EXPECT_NE(slow.update, kernel.update);
      twins += &RegisteredFor(slow) == &kernel ? 1 : 0;
    }
    EXPECT_EQ(twins, 1) << NameOf(kernel);
  }
}

TEST(IdentityTest, OrdinaryGradientsGiveTheSameBits) {
  for (const UnoptimizedKernel& slow : UnoptimizedKernels()) {
    for (const WireFormat& wire : WireFormats()) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(NameOf(RegisteredFor(slow)) + " " + wire.name);
        const auto gradient = [&](uint64_t t) {
          return Encoded(FindWireFormat(wire.name), Normals(t).Vector(kElements, 1e-3));
        };
        EXPECT_EQ(ExpectSameBits(slow, stochastic, 0.02, gradient).rejected, 0u);
      }
    }
  }
}

TEST(IdentityTest, AdversarialGradientsGiveTheSameBits) {
  for (const UnoptimizedKernel& slow : UnoptimizedKernels()) {
    for (const bool stochastic : {false, true}) {
      SCOPED_TRACE(NameOf(RegisteredFor(slow)));
      const auto gradient = [](uint64_t t) { return Encoded(0, Adversarial(t, kElements)); };
      const Outcome outcome = ExpectSameBits(slow, stochastic, 1, gradient);
      EXPECT_GT(outcome.rejected, 0u);
      EXPECT_LT(outcome.rejected * 5, outcome.blocks) << "most blocks must take the ordinary path";
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
