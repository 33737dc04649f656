// The curvature along the last update: against the oracle, for a loss whose curvature is known, and the same bits in
// every instruction set.
#include "tests/oracle/curvature.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "kernels/cpu/tables.h"
#include "tests/kernels/adversarial.h"
#include "tests/kernels/decoded.h"
#include "tests/kernels/probe.h"

namespace ballast::kernels {
namespace {

// Three sampled tiles, the last one short.
constexpr uint64_t kElements = 2 * kCurvatureEvery * kTile + 3001;
constexpr float kScale = 1.0f / 3, kClip = 0.3f;

std::vector<const Kernel*> ProbedKernels(std::span<const Kernel> kernels = Kernels()) {
  std::vector<const Kernel*> probed;
  for (const Kernel& kernel : kernels) {
    if (kernel.curvature != nullptr) probed.push_back(&kernel);
  }
  return probed;
}

// The second moment that the rule's denominator reads: of two components the first.
std::vector<double> VarianceOf(const Tensor& tensor) {
  if (std::string_view(tensor.kernel().state) != "mcf") return DecodeMoment(tensor, PlaneKind::kVariance).values;
  std::vector<double> values(tensor.size());
  const size_t plane = MomentPlane(tensor.kernel(), PlaneKind::kVariance);
  for (uint64_t i = 0; i < tensor.size(); ++i) {
    values[i] = oracle::ValueOf(ReadPlane<uint16_t>(tensor, plane, i), oracle::kBf16, 16);
  }
  return values;
}

// A decoded value, which takes the kernels up to four roundings.
oracle::Rounded Decoded(double x) { return {x, 4 * oracle::kUnit * std::abs(x)}; }

// One rounding: the product of two fp32 numbers is exact in double.
float Product(float a, float b) { return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)); }
float Taken(float sent) { return Product(Product(sent, kScale), kClip); }

std::vector<oracle::CurvatureSums> Oracle(const Tensor& tensor, uint64_t t, const std::vector<float>& grad,
                                          const std::vector<float>& before) {
  const Kernel& kernel = tensor.kernel();
  const oracle::Hypers hypers = HypersOf(kernel, DefaultHypers(kernel));
  const std::vector<double> m = DecodeMoment(tensor, PlaneKind::kMomentum).values, v = VarianceOf(tensor);
  std::vector<oracle::CurvatureSums> tiles(SampledTiles(tensor.size()));
  for (size_t s = 0; s < tiles.size(); ++s) {
    const uint64_t first = s * kCurvatureEvery * kTile;
    for (uint64_t i = first; i < std::min(first + kTile, tensor.size()); ++i) {
      const float g = Taken(grad[i]), old = Taken(before[i]);
      if (!std::isfinite(g) || !std::isfinite(old)) continue;
      const auto last = oracle::LastUpdateOf(kernel.rule, hypers, t, Decoded(m[i]), Decoded(v[i]));
      tiles[s].Add(last, static_cast<double>(g), static_cast<double>(old));
    }
  }
  return tiles;
}

void ExpectClose(const std::vector<oracle::CurvatureSums>& wanted, const std::vector<TileCurvature>& got) {
  ASSERT_EQ(wanted.size(), got.size());
  for (size_t s = 0; s < got.size(); ++s) {
    EXPECT_NEAR(static_cast<double>(got[s].u_dg), wanted[s].u_dg.value, wanted[s].u_dg.Bound()) << "sampled tile " << s;
    EXPECT_NEAR(static_cast<double>(got[s].u_pu), wanted[s].u_pu.value, wanted[s].u_pu.Bound()) << "sampled tile " << s;
    EXPECT_LT(wanted[s].u_pu.Bound(), 1e-4 * wanted[s].u_pu.value) << "a bound that says nothing";
  }
}

// Gradients as sent, exact in fp32.
std::vector<float> Sent(uint64_t seed) { return Normals(seed).Vector(kElements, 1e-2); }
Payload InFp32(const std::vector<float>& values) { return Encoded(FindWireFormat("fp32"), values); }

Tensor Stepped(const Kernel& kernel, uint64_t steps) {
  Tensor tensor(kernel, kElements);
  tensor.SetWeights(Normals(1).Vector(kElements, 0.02));
  for (uint64_t t = 1; t <= steps; ++t) tensor.Step(InFp32(Sent(t)), {.t = t, .grad_scale = kScale, .clip = kClip});
  return tensor;
}

TEST(CurvatureTest, SampledTilesAndWhatIsKeptOfThem) {
  static_assert(SampledTiles(1) == 1 && SampledElements(1) == kPad);
  static_assert(SampledTiles(16 * kTile) == 1 && SampledElements(16 * kTile) == kTile);
  static_assert(SampledTiles(16 * kTile + 1) == 2 && SampledElements(16 * kTile + 1) == kTile + kPad);
  static_assert(SampledTiles(kElements) == 3 && SampledElements(kElements) == 2 * kTile + 12 * kPad);
  EXPECT_EQ(SampledElements(uint64_t{1} << 30), uint64_t{1} << 26);
}

TEST(CurvatureTest, EveryRuleWithTwoMomentsHasIt) {
  for (const Kernel& kernel : Kernels()) {
    EXPECT_EQ(kernel.curvature != nullptr, kernel.has_rms) << NameOf(kernel);
    EXPECT_EQ(kernel.precondition != nullptr, kernel.has_rms) << NameOf(kernel);
  }
}

TEST(CurvatureTest, TheSumsAreTheOracles) {
  for (const Kernel* kernel : ProbedKernels()) {
    SCOPED_TRACE(NameOf(*kernel));
    Tensor tensor = Stepped(*kernel, 3);
    const std::vector<std::byte> planes = tensor.Bytes();
    Kept kept(kElements);
    ProbeCurvature(*kernel, &tensor, InFp32(Sent(3)), {.t = 2, .grad_scale = kScale, .clip = kClip}, &kept);
    const auto got =
        ProbeCurvature(*kernel, &tensor, InFp32(Sent(4)), {.t = 3, .grad_scale = kScale, .clip = kClip}, &kept);
    ExpectClose(Oracle(tensor, 3, Sent(4), Sent(3)), got);
    for (const TileCurvature& tile : got) EXPECT_EQ(tile.nonfinite, 0u);
    EXPECT_TRUE(tensor.Bytes() == planes) << "a probe stores nothing in the tensor";
  }
}

TEST(CurvatureTest, EveryGradientFormatIsTakenAsTheUpdateTakesIt) {
  const Kernel& kernel = *FindKernel("adamw", "split24", "companded8");
  Tensor tensor = Stepped(kernel, 2);
  for (const WireIndex format : GradientFormats()) {
    SCOPED_TRACE(NameOf(format));
    Kept sent(kElements), widened(kElements);
    for (const uint64_t seed : {5, 6}) {
      const std::vector<float> values = Normals(seed).Vector(kElements, 1e-2);
      const Payload payload = Encoded(format, values);
      std::vector<float> sums(kElements);
      WireFormats()[static_cast<size_t>(format)].accumulate(sums.data(), payload.bytes.data(), kElements, true);
      const StepOptions options{.t = 2, .grad_scale = kScale, .clip = kClip};
      const auto got = ProbeCurvature(kernel, &tensor, payload, options, &sent);
      const auto wanted = ProbeCurvature(kernel, &tensor, InFp32(sums), options, &widened);
      EXPECT_TRUE(SameBits(wanted, got));
      EXPECT_TRUE(sent == widened);
    }
  }
}

TEST(CurvatureTest, TheFirstProbeOnlyKeepsTheGradient) {
  const Kernel& kernel = *FindKernel("adamw", "fp32", "fp32");
  Tensor tensor = Stepped(kernel, 1);
  Kept kept(kElements);
  for (const TileCurvature& tile : ProbeCurvature(kernel, &tensor, InFp32(Sent(7)), {.t = 1}, &kept)) {
    EXPECT_EQ(tile.u_dg, 0);
    EXPECT_EQ(tile.u_pu, 0);
    EXPECT_EQ(tile.nonfinite, 0u);
  }
  const std::vector<float> sent = Sent(7);
  for (size_t s = 0; s < SampledTiles(kElements); ++s) {
    const uint64_t first = s * kCurvatureEvery * kTile;
    for (uint64_t i = 0; i < kTile && first + i < kElements; ++i) {
      ASSERT_EQ(kept.data()[s * kTile + i], sent[first + i]) << first + i;
    }
  }
  EXPECT_TRUE(kept.GuardIsIntact());
}

// What is not sampled is not looked at; what is not finite is counted, left out, and kept, so that the next probe tells
// it too.
TEST(CurvatureTest, NonFiniteElementsAreCountedInBothProbesTheyTouch) {
  const Kernel& kernel = *FindKernel("adamw", "split24", "companded8");
  Tensor tensor = Stepped(kernel, 2);
  const StepOptions options{.t = 2, .grad_scale = kScale, .clip = kClip};
  std::vector<float> broken = Sent(9);
  std::fill(broken.begin() + kTile, broken.begin() + kCurvatureEvery * kTile, NAN);
  broken[3] = NAN, broken[kTile - 1] = INFINITY, broken[kElements - 1] = -INFINITY;
  Kept kept(kElements);
  ProbeCurvature(kernel, &tensor, InFp32(Sent(8)), options, &kept);
  for (const auto& [grad, before] : {std::pair{broken, Sent(8)}, {Sent(10), broken}}) {
    const auto got = ProbeCurvature(kernel, &tensor, InFp32(grad), options, &kept);
    ExpectClose(Oracle(tensor, 2, grad, before), got);
    EXPECT_EQ(got[0].nonfinite, 2u);
    EXPECT_EQ(got[1].nonfinite, 0u);
    EXPECT_EQ(got[2].nonfinite, 1u);
    EXPECT_EQ(Combine(got).nonfinite, 3u);
  }
  EXPECT_EQ(Combine(ProbeCurvature(kernel, &tensor, InFp32(Sent(11)), options, &kept)).nonfinite, 0u);
}

TEST(CurvatureTest, TilesAreCombinedInOrderInDouble) {
  const std::vector<TileCurvature> tiles = {{1e30f, 2, 4000000000u}, {1, 0x1p-30f, 4000000000u}};
  const Curvature c = Combine(tiles);
  EXPECT_EQ(c.u_dg, static_cast<double>(1e30f) + 1);
  EXPECT_EQ(c.u_pu, 2 + 0x1p-30);
  EXPECT_EQ(c.nonfinite, 8000000000u);
}

// f = sum a x^2 / 2: g - g before = a d whatever the point, so lr kappa is lr times the Rayleigh quotient of the
// preconditioned Hessian along u, sum a u^2 / sum p u^2 over the sampled tiles.
struct Quadratic {
  const char* rule;
  const char* master;
  const char* state;
  double tolerance;  // what the fp32 of g and x leave of a difference; for Collage the rounding of d to bf16
};
class QuadraticTest : public testing::TestWithParam<Quadratic> {};

TEST_P(QuadraticTest, TheProbeIsTheRayleighQuotientAlongTheLastUpdate) {
  const Quadratic& c = GetParam();
  const Kernel& kernel = *FindKernel(c.rule, c.master, c.state);
  constexpr double kLr = 0.05;
  const auto hyper =
      Hypers(kernel, {{"lr", kLr}, {"weight_decay", 0}, {"beta1", 0.875}, {"beta2", 0.9375}, {"eps", 0.125}});
  const oracle::Hypers hypers = HypersOf(kernel, hyper);
  Normals random(3);
  std::vector<double> a(kElements);
  for (double& x : a) x = 0.5 + 1.5 * random.Uniform();
  Tensor tensor(kernel, kElements);
  tensor.SetWeights(random.Vector(kElements, 1));
  Kept kept(kElements);
  double held = 1;  // of kernels/NUMERICS.md, "Curvature"
  for (uint64_t t = 1; t <= 6; ++t) {
    std::vector<float> grad = tensor.Weights();
    for (size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<float>(a[i] * static_cast<double>(grad[i]));
    const Curvature got = Combine(ProbeCurvature(kernel, &tensor, InFp32(grad), {.hyper = hyper, .t = t - 1}, &kept));
    if (t > 1) {
      const std::vector<double> m = DecodeMoment(tensor, PlaneKind::kMomentum).values, v = VarianceOf(tensor);
      double above = 0, below = 0;
      for (uint64_t i = 0; i < kElements; ++i) {
        if (i / kTile % kCurvatureEvery != 0) continue;
        const auto last = oracle::LastUpdateOf(c.rule, hypers, t - 1, oracle::Exact(m[i]), oracle::Exact(v[i]));
        above += a[i] * last.u.value * last.u.value;
        below += last.p.value * last.u.value * last.u.value;
      }
      const double wanted = kLr * above / below;
      EXPECT_NEAR(-got.u_dg / (held * got.u_pu), wanted, c.tolerance * wanted) << "step " << t;
    }
    const Statistics s = Combine(tensor.Step(InFp32(grad), {.hyper = hyper, .t = t}), true);
    if (kernel.finish != nullptr) held = 1 / std::max(1.0, std::sqrt(s.rms_sq / kElements));
  }
}
INSTANTIATE_TEST_SUITE_P(Rules, QuadraticTest,
                         testing::Values(Quadratic{"adamw", "fp32", "fp32", 1e-6},
                                         Quadratic{"adam", "fp32", "fp32", 1e-6},
                                         Quadratic{"stable_adamw", "fp32", "fp32", 1e-6},
                                         Quadratic{"collage_light", "mcf", "bf16", 5e-3},
                                         Quadratic{"collage_plus", "mcf", "mcf", 5e-3}),
                         [](const auto& test) { return std::string(test.param.rule); });

// Two probes of states and gradients of any size, in pieces and at once.
TEST(CurvatureTest, EveryLaneAndAnyPiecesGiveTheSameBits) {
  for (const bool adversarial : {false, true}) {
    uint64_t nonfinite = 0;
    const auto grads = [&](uint64_t t) { return adversarial ? Adversarial(t, kElements) : Sent(t); };
    for (size_t k = 0; k < Kernels().size(); ++k) {
      const Kernel& scalar = ScalarTables().kernels[k];
      if (scalar.curvature == nullptr) continue;
      SCOPED_TRACE(NameOf(scalar));
      const auto format = GradientFormats()[k % GradientFormats().size()];
      Tensor tensor(scalar, kElements);
      tensor.Step(Encoded(format, grads(1)), {.t = 1});
      const std::vector<Payload> payloads = {Encoded(format, grads(2)), Encoded(format, grads(3))};
      for (const IsaTables* isa : UsableIsas()) {
        Kept wanted(kElements), got(kElements);
        for (const Payload& payload : payloads) {
          const StepOptions options{.t = 1, .clip = adversarial ? 1.0f : kClip};
          const auto a = ProbeCurvature(scalar, &tensor, payload, options, &wanted);
          const auto b = ProbeInPieces(isa->kernels[k], &tensor, payload, options, &got);
          ASSERT_TRUE(SameBits(a, b)) << isa->name;
          ASSERT_TRUE(wanted == got) << isa->name;
          nonfinite += Combine(a).nonfinite;
        }
      }
    }
    EXPECT_EQ(nonfinite > 0, adversarial);
  }
}

}  // namespace
}  // namespace ballast::kernels
