// The GPU's driver gives the CPU's bits: every kernel of the registry with every gradient format and rounding, over
// several steps, ordinary and adversarial inputs, ragged tails, as 32 threads side by side on a CPU (lockstep.h).
// Statistics included. What a GPU's own arithmetic makes of it: tests/gpu_check.sh, on a machine with one.
#include <gtest/gtest.h>

#include <iostream>
#include <limits>

#include "kernels/cuda/cuda_kernels.h"
#include "tests/kernels/adversarial.h"
#include "tests/kernels/cuda/lockstep_kernels.h"
#include "tests/kernels/probe.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 2 * kTile + 1000;
constexpr uint64_t kSteps = 3;
constexpr StatisticsLevel kLevels[] = {StatisticsLevel::kFull, StatisticsLevel::kOff, StatisticsLevel::kCore};

// With room for whole rows; what is there must not matter.
Payload Roomy(Payload payload) {
  payload.bytes.resize(payload.bytes.size() + kPad * 4, std::byte{0xff});
  return payload;
}

// The first pass of a rule over matrices gives the CPU's directions, which the update is then to take.
void ExpectSameDirections(const LockstepKernel& warp, const Update& u) {
  const std::vector<float> wanted(u.direction, u.direction + PaddedElements(u.n));
  std::vector<float> sums(TilesOf(u.n));
  std::fill_n(u.direction, wanted.size(), std::numeric_limits<float>::quiet_NaN());
  warp.measure(u, 0, sums.size(), sums.data());
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), u.direction));
}

std::vector<TileStatistics> WarpStep(size_t k, Tensor* tensor, const Payload& grad, const StepOptions& options) {
  const LockstepKernel& warp = LockstepKernels()[k];
  Update u = tensor->MakeUpdate(grad, options);
  std::vector<TileStatistics> stats(tensor->tiles());
  if (tensor->kernel().fit != nullptr) {
    ExpectSameDirections(warp, u);
  } else if (warp.measure != nullptr) {
    std::vector<float> sums(tensor->tiles());
    warp.measure(u, 0, tensor->tiles(), sums.data());
    double sum = 0;
    for (const float s : sums) sum += static_cast<double>(s);
    tensor->kernel().finish(sum, tensor->size(), u.constants);
  }
  (IsOrdinary(u) ? warp.update_ordinary : warp.update)(u, 0, tensor->tiles(), stats.data());
  return stats;
}

struct Totals {
  uint64_t states = 0, blocks = 0, rejected = 0;
};

// The statistics of an update that is only tried, and that it stores nothing.
void ExpectDryIsTheSame(size_t k, Tensor* a, Tensor* b, const Payload& grad, StepOptions options) {
  if (options.statistics == StatisticsLevel::kFull) options.statistics = StatisticsLevel::kCore;
  options.dry = true;
  const auto before = b->Bytes();
  const auto wanted = a->Step(grad, options), got = WarpStep(k, b, Roomy(grad), options);
  ASSERT_EQ(std::memcmp(wanted.data(), got.data(), got.size() * sizeof got[0]), 0) << "dry, step " << options.t;
  ASSERT_TRUE(b->Bytes() == before) << "dry, step " << options.t;
}

void ExpectSameBits(size_t k, size_t wire, bool stochastic, bool adversarial, uint64_t elements, Totals* totals) {
  Tensor a(Kernels()[k], elements);
  a.SetWeights(Normals(1).Vector(elements, adversarial ? 1 : 0.02));
  Tensor b = a;
  for (uint64_t t = 1; t <= kSteps; ++t) {
    const StepOptions options{
        .t = t, .stochastic = stochastic, .statistics = kLevels[t % 3], .clip = t % 2 == 0 ? 0.3f : 1.0f};
    const auto values = adversarial ? Adversarial(t, elements) : Normals(t).Vector(elements, 1e-3);
    const Payload grad = Encoded(static_cast<WireIndex>(wire), values);
    ExpectDryIsTheSame(k, &a, &b, grad, options);
    const auto wanted = a.Step(grad, options), got = WarpStep(k, &b, Roomy(grad), options);
    ASSERT_EQ(std::memcmp(wanted.data(), got.data(), got.size() * sizeof got[0]), 0) << "statistics, step " << t;
    ASSERT_TRUE(a.Bytes() == b.Bytes()) << "planes, step " << t;
    ASSERT_TRUE(b.GuardsAreIntact());
    totals->states += elements;
    totals->blocks += (elements + kBlock - 1) / kBlock;
    for (const TileStatistics& s : wanted) totals->rejected += s.rejected;
  }
}

Totals WalkAll(bool adversarial, uint64_t elements) {
  Totals totals;
  for (size_t k = 0; k < Kernels().size(); ++k) {
    for (size_t wire = 0; wire < WireFormats().size(); ++wire) {
      if (!WireFormats()[wire].gradient) continue;
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(NameOf(Kernels()[k]) + " gradients " + WireFormats()[wire].name +
                     (stochastic ? " stochastic" : " nearest"));
        ExpectSameBits(k, wire, stochastic, adversarial, elements, &totals);
        if (testing::Test::HasFatalFailure()) return totals;
      }
    }
  }
  std::cout << totals.states << " states compared, " << totals.rejected << " of " << totals.blocks
            << " blocks rejected\n";
  return totals;
}

TEST(WarpTest, OrdinaryGradientsGiveTheSameBits) { EXPECT_EQ(WalkAll(false, kElements).rejected, 0u); }

TEST(WarpTest, AdversarialGradientsGiveTheSameBits) {
  const Totals totals = WalkAll(true, kElements);
  EXPECT_GT(totals.rejected, 0u);
  EXPECT_LT(totals.rejected * 5, totals.blocks) << "most blocks must take the ordinary path";
}

// Which rows of an ordinary update are done again by the driver that looks at its operands.
uint64_t RowsDoneAgain(const char* master, const std::vector<float>& gradient) {
  const auto k = static_cast<size_t>(FindKernel("adamw", master, "companded8") - Kernels().data());
  Tensor tensor(Kernels()[k], gradient.size());
  tensor.SetWeights(Normals(1).Vector(gradient.size(), 0.02));
  const uint64_t before = LockstepCheckedRoots();
  WarpStep(k, &tensor, Roomy(Encoded(FindWireFormat("fp32"), gradient)), {.statistics = StatisticsLevel::kCore});
  return (LockstepCheckedRoots() - before) / 8;
}

TEST(WarpTest, ARowIsDoneAgainOnlyWhereANumberIsOutOfRange) {
  for (const char* master : {"split24", "split32"}) {
    const std::vector<float> normals = Normals(2).Vector(2 * kTile, 1e-3);
    EXPECT_EQ(RowsDoneAgain(master, normals), 0u);
    EXPECT_EQ(RowsDoneAgain(master, std::vector<float>(2 * kTile, 0.0f)), 0u);
    // A last row that is not whole, a gradient that is not finite, a v of which the root's error is no normal number, an m
    // by whose scale nothing may be divided.
    EXPECT_EQ(RowsDoneAgain(master, std::vector<float>(normals.begin(), normals.end() - 1)), 1u);
    for (const float odd : {std::numeric_limits<float>::infinity(), 1e-15f, 1e-30f}) {
      std::vector<float> one = std::vector<float>(2 * kTile, 0.0f);
      one[kTile + 3] = odd;
      EXPECT_EQ(RowsDoneAgain(master, one), 1u) << odd;
    }
  }
}

// Ordinary updates, each of another size, so that what is divided comes to the ends of its range and goes past them.
TEST(WarpTest, OrdinaryUpdatesOfEverySizeGiveTheSameBits) {
  constexpr uint64_t kSizes = 4;
  for (size_t k = 0; k < Kernels().size(); ++k) {
    if (LockstepKernels()[k].update_ordinary == LockstepKernels()[k].update) continue;
    for (const bool stochastic : {false, true}) {
      SCOPED_TRACE(NameOf(Kernels()[k]));
      Tensor a(Kernels()[k], kElements);
      a.SetWeights(Normals(1).Vector(kElements, 0.02));
      Tensor b = a;
      const uint64_t before = LockstepCheckedRoots();
      for (uint64_t t = 1; t <= kSizes; ++t) {
        const StepOptions options{.t = t, .stochastic = stochastic, .statistics = StatisticsLevel::kCore};
        const Payload grad = Encoded(FindWireFormat("fp32"), Narrow(t, kElements));
        const auto wanted = a.Step(grad, options), got = WarpStep(k, &b, Roomy(grad), options);
        ASSERT_EQ(std::memcmp(wanted.data(), got.data(), got.size() * sizeof got[0]), 0) << "statistics, step " << t;
        ASSERT_TRUE(a.Bytes() == b.Bytes()) << "planes, step " << t;
      }
      if (std::string_view(Kernels()[k].rule) != "adamw") continue;
      const uint64_t rows = kSizes * (PaddedElements(kElements) / kPad), again = (LockstepCheckedRoots() - before) / 8;
      EXPECT_GT(again, rows / 20);
      EXPECT_LT(again, rows / 2);
    }
  }
}

TEST(WarpTest, EveryLengthOfTheLastRowGivesTheSameBits) {
  const size_t k = static_cast<size_t>(FindKernel("adamw", "split24", "companded8") - Kernels().data());
  Totals totals;
  for (uint64_t elements = 1; elements <= 2 * kPad; ++elements) {
    ExpectSameBits(k, static_cast<size_t>(FindWireFormat("bf16")), true, true, elements, &totals);
    ASSERT_FALSE(HasFatalFailure()) << elements << " elements";
  }
}

TEST(WarpTest, MeasuringGivesTheSameBits) {
  for (const bool adversarial : {false, true}) {
    const auto values = adversarial ? Adversarial(9, kElements) : Normals(9).Vector(kElements, 1e-3);
    for (const WireIndex format : GradientFormats()) {
      const Payload grad = Encoded(format, values), roomy = Roomy(grad);
      for (const uint64_t n : {kElements, kElements - 7, kTile, uint64_t{257}, uint64_t{1}}) {
        SCOPED_TRACE(std::string(NameOf(format)) + ", " + std::to_string(n) + " elements");
        const uint64_t tiles = (n + kTile - 1) / kTile;
        std::vector<TileStatistics> wanted(tiles), got(tiles);
        WireFormats()[static_cast<size_t>(format)].measure(grad.bytes.data(), n, 1.0f / 3, 0, tiles, wanted.data());
        LockstepMeasure(format, roomy.bytes.data(), n, 1.0f / 3, 0, tiles, got.data());
        EXPECT_EQ(std::memcmp(wanted.data(), got.data(), tiles * sizeof got[0]), 0);
        if (n >= kTile) {
          EXPECT_EQ(wanted[0].nonfinite > 0, adversarial);
        }
      }
    }
  }
}

// What ranks sent of a part, and what is around the sum: 16 bytes before it, and 32 behind its last eight elements.
TEST(WarpTest, SummingGivesTheSameBits) {
  for (const WireIndex format : GradientFormats()) {
    const WireFormat& wire = WireFormats()[static_cast<size_t>(format)];
    std::vector<Payload> sent;
    for (uint64_t rank = 0; rank < 3; ++rank) {
      sent.push_back(
          Roomy(Encoded(format, rank == 1 ? Adversarial(9, kElements) : Normals(rank).Vector(kElements, 1))));
    }
    std::vector<const std::byte*> terms;
    for (const Payload& payload : sent) terms.push_back(payload.bytes.data());
    for (const uint64_t n : {kElements, kElements - 7, kTile, uint64_t{257}, uint64_t{1}}) {
      for (int count = 0; count <= 3; ++count) {
        for (const bool first : {true, false}) {
          SCOPED_TRACE(std::string(NameOf(format)) + ", " + std::to_string(n) + " elements, " + std::to_string(count) +
                       " terms" + (first ? ", the first" : ""));
          std::vector<float> wanted(n, first ? -0.0f : 0.75f), got((n + 7) / 8 * 8 + 12, 0.75f);
          const std::vector<float> around = got;
          for (int term = 0; term < count; ++term) {
            wire.accumulate(wanted.data(), terms[static_cast<size_t>(term)], n, first && term == 0);
          }
          DeviceSum sum{.to = reinterpret_cast<std::byte*>(got.data() + 4),
                        .n = n,
                        .terms = terms.data(),
                        .term_count = count,
                        .format = format,
                        .adds = true,
                        .first = first};
          LockstepSum(sum);
          ASSERT_EQ(std::memcmp(wanted.data(), got.data() + 4, n * sizeof(float)), 0);
          EXPECT_TRUE(std::equal(got.begin(), got.begin() + 4, around.begin()));
          EXPECT_TRUE(std::equal(got.end() - 8, got.end(), around.end() - 8));
        }
      }
    }
  }
}

// Where one term is all that comes it is what it was, whatever its bits.
TEST(WarpTest, OneTermIsCopiedAsItIs) {
  for (const WireIndex format : GradientFormats()) {
    const Payload sent = Roomy(Encoded(format, Adversarial(9, kElements)));
    const std::byte* const term = sent.bytes.data();
    const uint64_t bytes = (kElements - 7) * static_cast<uint64_t>(WireFormats()[static_cast<size_t>(format)].bytes);
    for (const int count : {0, 1}) {
      std::vector<std::byte> got(bytes + 64, std::byte{7});
      LockstepSum({.to = got.data(),
                   .n = kElements - 7,
                   .terms = &term,
                   .term_count = count,
                   .format = format,
                   .adds = false,
                   .first = true});
      const std::vector<std::byte> zeros(bytes);
      EXPECT_EQ(std::memcmp(got.data(), count == 1 ? term : zeros.data(), bytes), 0) << NameOf(format);
      EXPECT_TRUE(std::all_of(got.end() - 32, got.end(), [](std::byte b) { return b == std::byte{7}; }));
    }
  }
}

TEST(WarpTest, ProbingGivesTheSameBits) {
  for (const bool adversarial : {false, true}) {
    for (size_t k = 0; k < Kernels().size(); ++k) {
      const Kernel& kernel = Kernels()[k];
      ASSERT_EQ(kernel.curvature != nullptr, LockstepKernels()[k].curvature != nullptr);
      if (kernel.curvature == nullptr) continue;
      const WireIndex format = GradientFormats()[k % GradientFormats().size()];
      for (const uint64_t n : {kCurvatureEvery * kTile + 1000 + k, uint64_t{257}, uint64_t{1}}) {
        SCOPED_TRACE(NameOf(kernel) + ", " + std::to_string(n) + " elements");
        const auto grad = [&](uint64_t t) {
          return Encoded(format, adversarial ? Adversarial(t, n) : Normals(t).Vector(n, 1e-3));
        };
        Tensor tensor(kernel, n);
        tensor.Step(grad(1), {.t = 1});
        Kept a(n), b(n);
        for (const uint64_t t : {2, 3}) {
          const StepOptions options{.t = t - 1, .grad_scale = 1.0f / 3, .clip = t == 2 ? 1.0f : 0.3f};
          const Payload sent = grad(t), roomy = Roomy(sent);
          const auto wanted = ProbeCurvature(kernel, &tensor, sent, options, &a);
          std::vector<TileCurvature> got(wanted.size());
          const CurvatureProbe probe = MakeProbe(kernel, &tensor, roomy, options, &b);
          LockstepKernels()[k].curvature(probe, 0, got.size(), got.data());
          ASSERT_TRUE(SameBits(wanted, got)) << "probe " << t;
          ASSERT_TRUE(a == b) << "probe " << t;
        }
      }
    }
  }
}

// Without statistics an update reads the gradient and every plane once and writes every plane once; the first pass of a
// rule of two reads the gradient and one moment. Of a rule over matrices the first pass writes directions, which the update
// reads.
TEST(WarpTest, EveryByteMovesOnce) {
  constexpr uint64_t kWhole = 4 * kTile;
  const WireIndex bf16 = FindWireFormat("bf16");
  const Payload grad = Encoded(bf16, Normals(1).Vector(kWhole, 1e-3));
  for (size_t k = 0; k < Kernels().size(); ++k) {
    const Kernel& kernel = Kernels()[k];
    SCOPED_TRACE(NameOf(kernel));
    const uint64_t directions = kernel.fit != nullptr ? kWhole * sizeof(float) : 0;
    const PlaneKind measured = kernel.fit != nullptr ? PlaneKind::kMomentum : PlaneKind::kVariance;
    Tensor tensor(kernel, kWhole);
    uint64_t planes = 0, moment = 0;
    for (const Plane& plane : kernel.planes) {
      planes += PlaneBytes(plane, kWhole);
      if (plane.kind == measured) moment += PlaneBytes(plane, kWhole);
    }
    const Update u = tensor.MakeUpdate(grad, {.statistics = StatisticsLevel::kOff});
    std::vector<TileStatistics> stats(tensor.tiles());
    LockstepKernels()[k].update(u, 0, tensor.tiles(), stats.data());
    EXPECT_EQ(LockstepBytesMoved(), 2 * kWhole + 2 * planes + directions);
    if (kernel.measure == nullptr) continue;
    std::vector<float> sums(tensor.tiles());
    LockstepKernels()[k].measure(u, 0, tensor.tiles(), sums.data());
    EXPECT_EQ(LockstepBytesMoved(), 2 * kWhole + moment + directions);
  }
}

// A master's planes.
struct Planes {
  Planes(const MasterFormat& master, uint64_t n) {
    for (const Plane& plane : master.planes) {
      bytes.emplace_back(PlaneBytes(plane, n), std::byte{0x5a});
    }
    for (auto& plane : bytes) at.push_back(plane.data());
  }
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> at;
};

TEST(WarpTest, LoadingGivesTheSameBits) {
  std::vector<float> values = Adversarial(9, kElements);
  for (float& x : values) x = std::isfinite(x) ? x : 0.0f;
  for (size_t m = 0; m < MasterFormats().size(); ++m) {
    for (size_t wire = 0; wire < WireFormats().size(); ++wire) {
      if (!WireFormats()[wire].gradient) continue;
      const Payload payload = Encoded(static_cast<WireIndex>(wire), values), roomy = Roomy(payload);
      Planes a(MasterFormats()[m], kElements), b(MasterFormats()[m], kElements);
      const bool loaded = MasterFormats()[m].load(a.at.data(), payload.format, payload.bytes.data(), 0, kElements);
      EXPECT_EQ(LockstepMasters()[m].load(b.at.data(), payload.format, roomy.bytes.data(), 0, kElements), loaded);
      EXPECT_TRUE(a.bytes == b.bytes) << MasterFormats()[m].name << " from " << WireFormats()[wire].name;
    }
  }
}

TEST(WarpTest, ARefusedLoadStoresNothing) {
  std::vector<float> values(kElements, 1.0f);
  values.back() = std::numeric_limits<float>::infinity();
  const Payload roomy = Roomy(Encoded(FindWireFormat("fp32"), values));
  for (size_t m = 0; m < MasterFormats().size(); ++m) {
    Planes planes(MasterFormats()[m], kElements);
    const auto before = planes.bytes;
    EXPECT_FALSE(LockstepMasters()[m].load(planes.at.data(), roomy.format, roomy.bytes.data(), 0, kElements));
    EXPECT_TRUE(planes.bytes == before);
  }
}

// Rows of the tensor shorter and longer than a thread's eight elements and a warp's 256, and pieces that begin inside.
TEST(WarpTest, ServingGivesTheSameBits) {
  const std::vector<float> values = Normals(3).Vector(kElements, 1);
  for (size_t m = 0; m < MasterFormats().size(); ++m) {
    const MasterFormat& master = MasterFormats()[m];
    Planes planes(master, kElements);
    ASSERT_TRUE(master.load(planes.at.data(), FindWireFormat("fp32"), values.data(), 0, kElements));
    for (const uint64_t row : {uint64_t{3}, uint64_t{24}, uint64_t{333}, uint64_t{1149}, kElements}) {
      std::vector<float> scales(kElements / row + 1), raised(scales.size());
      for (uint64_t e = 0; e < kElements; e += row) {
        scales[e / row] = master.absmax(planes.at.data(), e, std::min(e + row, kElements));
      }
      LockstepMasters()[m].raise(planes.at.data(), raised.data(), row, 0, kElements);
      EXPECT_EQ(scales, raised) << master.name << ", rows of " << row;
      for (size_t wire = 0; wire < WireFormats().size(); ++wire) {
        if (!WireFormats()[wire].serving) continue;
        for (const auto& [first, last] :
             {std::pair<uint64_t, uint64_t>{0, kElements}, {kBlock, kBlock + 1}, {4128, 8000}}) {
          const uint64_t bytes = (last - first) * WireFormats()[wire].bytes;
          std::vector<std::byte> wanted(bytes), got(bytes + 4 * kPad);
          const WireIndex format = static_cast<WireIndex>(wire);
          master.encode_weights(planes.at.data(), format, scales.data(), row, wanted.data(), first, last);
          LockstepMasters()[m].encode_weights(planes.at.data(), format, scales.data(), row, got.data(), first, last);
          EXPECT_EQ(std::memcmp(wanted.data(), got.data(), bytes), 0)
              << master.name << " as " << WireFormats()[wire].name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
