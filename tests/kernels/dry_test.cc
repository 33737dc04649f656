// An update that is only tried: every kernel on every isa says of it what the update that stores says, and leaves
// every byte of the planes alone.
#include <gtest/gtest.h>

#include "kernels/cpu/tables.h"
#include "tests/kernels/adversarial.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 2 * kTile + 1000, kSteps = 3;

// The statistics of a tensor's tiles, as far as an update without full ones has them.
std::vector<std::byte> BytesOf(const std::vector<TileStatistics>& stats) {
  std::vector<std::byte> bytes(stats.size() * sizeof stats[0]);
  std::memcpy(bytes.data(), stats.data(), bytes.size());
  return bytes;
}

// Each step is tried before it is taken; kSteps of them, so that the state is not that of a new tensor.
void ExpectDryIsSilent(const Kernel& kernel, WireIndex format, bool stochastic, bool adversarial, uint64_t* rejected) {
  Tensor tensor(kernel, kElements);
  tensor.SetWeights(Normals(1).Vector(kElements, adversarial ? 1 : 0.02));
  for (uint64_t t = 1; t <= kSteps; ++t) {
    const auto values = adversarial ? Adversarial(t, kElements) : Normals(t).Vector(kElements, 1e-3);
    const Payload grad = Encoded(format, values);
    StepOptions options{.t = t,
                        .stochastic = stochastic,
                        .statistics = t == 2 ? StatisticsLevel::kOff : StatisticsLevel::kCore,
                        .grad_scale = t == 3 ? 0.37f : 1.0f,
                        .clip = t == 3 ? 0.3f : 1.0f,
                        .dry = true};
    const std::vector<std::byte> before = tensor.Bytes();
    const auto tried = tensor.Step(grad, options);
    ASSERT_TRUE(tensor.Bytes() == before) << "step " << t;
    ASSERT_TRUE(tensor.GuardsAreIntact());
    options.dry = false;
    const auto taken = tensor.Step(grad, options);
    ASSERT_TRUE(BytesOf(tried) == BytesOf(taken)) << "step " << t;
    ASSERT_FALSE(tensor.Bytes() == before) << "the update that stores must store";
    for (const TileStatistics& s : tried) *rejected += s.rejected;
  }
}

void Walk(bool adversarial, uint64_t* rejected) {
  for (const IsaTables* isa : UsableIsas()) {
    for (const Kernel& kernel : isa->kernels) {
      for (const WireIndex format : GradientFormats()) {
        const bool stochastic = format % 2 == 0;
        SCOPED_TRACE(NameOf(kernel) + " gradients " + NameOf(format) + (stochastic ? " stochastic " : " nearest ") +
                     isa->name);
        ExpectDryIsSilent(kernel, format, stochastic, adversarial, rejected);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(DryTest, OrdinaryGradientsAreMeasuredAndNothingIsStored) {
  uint64_t rejected = 0;
  Walk(false, &rejected);
  EXPECT_EQ(rejected, 0u);
}

TEST(DryTest, AdversarialGradientsAreMeasuredAndNothingIsStored) {
  uint64_t rejected = 0;
  Walk(true, &rejected);
  EXPECT_GT(rejected, 0u);
}

// The figures that a verdict uses do not depend on whether full statistics are asked for.
TEST(DryTest, TheCoreStatisticsAreThoseOfAFullUpdate) {
  const Kernel& kernel = *FindKernel("adamw", "split24", "companded8");
  Tensor tensor(kernel, kElements);
  const Payload grad = Encoded(FindWireFormat("bf16"), Adversarial(4, kElements));
  const auto tried = tensor.Step(grad, {.statistics = StatisticsLevel::kCore, .dry = true});
  const auto taken = tensor.Step(grad, {.statistics = StatisticsLevel::kFull});
  for (size_t tile = 0; tile < tried.size(); ++tile) {
    EXPECT_EQ(tried[tile].grad_sq, taken[tile].grad_sq);
    EXPECT_EQ(tried[tile].update_sq, taken[tile].update_sq);
    EXPECT_EQ(tried[tile].rms_sq, taken[tile].rms_sq);
    EXPECT_EQ(tried[tile].rejected, taken[tile].rejected);
  }
}

}  // namespace
}  // namespace ballast::kernels
