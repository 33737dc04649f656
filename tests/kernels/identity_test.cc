// The isa, the number of threads, the chunking and the optimizer change no bit: every kernel of the registry with
// every gradient format and rounding, ordinary and adversarial inputs, several steps, in every isa this machine can
// run, against the scalar isa; and that against the same text compiled without optimization.
#include <gtest/gtest.h>

#include <array>
#include <iostream>
#include <set>
#include <thread>

#include "kernels/cpu/tables.h"
#include "tests/kernels/adversarial.h"
#include "tests/kernels/cpu/unoptimized_kernels.h"
#include "tests/kernels/probe.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

// An emulated processor takes a shorter walk (tests/emulated/kernels.sh).
#ifdef BALLAST_SHORT_IDENTITY
constexpr uint64_t kElements = kPad + 1000, kSteps = 3;
#else
constexpr uint64_t kElements = 5 * kTile + 1000, kSteps = 4;
#endif
constexpr uint64_t kFormsOfEach = 4 * 2;  // gradient formats, roundings
constexpr StatisticsLevel kLevels[] = {StatisticsLevel::kOff, StatisticsLevel::kCore, StatisticsLevel::kFull};

struct Totals {
  uint64_t states = 0, blocks = 0, rejected = 0;
};

// Gradients of one kind, in every format fit for them, one for each step: made once, used by all kernels.
class Gradients {
 public:
  explicit Gradients(bool adversarial) {
    for (size_t w = 0; w < WireFormats().size(); ++w) {
      if (!WireFormats()[w].gradient) continue;
      for (uint64_t t = 1; t <= kSteps; ++t) {
        const auto values = adversarial ? Adversarial(t, kElements) : Normals(t).Vector(kElements, 1e-3);
        of_[w].push_back(Encoded(static_cast<WireIndex>(w), values));
      }
    }
  }
  const std::vector<Payload>& operator[](size_t wire) const { return of_[wire]; }

 private:
  std::array<std::vector<Payload>, 16> of_;
};

using Stepper = std::vector<TileStatistics> (*)(Tensor*, const Payload&, const StepOptions&);

// The tensor's tiles shared by two threads, one of which goes back to front, tile by tile. On a single processor (an
// emulated one may not switch threads) one after the other.
std::vector<TileStatistics> StepInPieces(Tensor* tensor, const Payload& grad, const StepOptions& options) {
  Update u = tensor->MakeUpdate(grad, options);
  const Kernel& kernel = tensor->kernel();
  const uint64_t tiles = tensor->tiles(), half = tiles / 2;
  std::vector<TileStatistics> stats(tiles);
  const auto in_pieces = [&](const auto& run) {
    const bool one = std::thread::hardware_concurrency() == 1;
    if (one) run(half, tiles);
    std::thread other(one ? std::thread() : std::thread([&] { run(half, tiles); }));
    for (uint64_t tile = half; tile-- > 0;) run(tile, tile + 1);
    if (other.joinable()) other.join();
  };
  if (kernel.measure != nullptr) {
    std::vector<float> sums(tiles);
    in_pieces([&](uint64_t first, uint64_t last) { kernel.measure(u, first, last, &sums[first]); });
    double sum = 0;
    for (const float s : sums) sum += static_cast<double>(s);
    if (kernel.finish != nullptr) kernel.finish(sum, tensor->size(), u.constants);
  }
  in_pieces([&](uint64_t first, uint64_t last) { kernel.update(u, first, last, &stats[first]); });
  return stats;
}
std::vector<TileStatistics> StepAtOnce(Tensor* tensor, const Payload& grad, const StepOptions& options) {
  return tensor->Step(grad, options);
}

struct Variant {
  const Kernel* kernel;
  Stepper step;
  std::string name;
};

// Every isa but the first, which is the reference, at once; the best in pieces; and the unoptimized one.
std::vector<Variant> VariantsOf(size_t k) {
  std::vector<Variant> variants;
  for (const IsaTables* isa : UsableIsas().subspan(1)) {
    variants.push_back({&isa->kernels[k], &StepAtOnce, isa->name});
  }
  const IsaTables& best = *UsableIsas().back();
  variants.push_back({&best.kernels[k], &StepInPieces, std::string(best.name) + " in pieces on two threads"});
  return variants;
}

// Steps every variant and the reference side by side.
void ExpectSameBits(const Kernel& reference, const std::vector<Variant>& variants, const std::vector<Payload>& grads,
                    bool stochastic, double weight_scale, Totals* totals) {
  Tensor a(reference, kElements);
  a.SetWeights(Normals(1).Vector(kElements, weight_scale));
  std::vector<Tensor> others;
  for (const Variant& v : variants) {
    others.emplace_back(*v.kernel, kElements);
    others.back().SetWeights(Normals(1).Vector(kElements, weight_scale));
  }
  for (uint64_t t = 1; t <= grads.size(); ++t) {
    const StepOptions options{
        .t = t, .stochastic = stochastic, .statistics = kLevels[t % 3], .clip = t % 2 == 0 ? 0.3f : 1.0f};
    const std::vector<TileStatistics> wanted = a.Step(grads[t - 1], options);
    const std::vector<std::byte> planes = a.Bytes();
    for (size_t i = 0; i < variants.size(); ++i) {
      SCOPED_TRACE(variants[i].name);
      const std::vector<TileStatistics> got = variants[i].step(&others[i], grads[t - 1], options);
      ASSERT_EQ(std::memcmp(wanted.data(), got.data(), got.size() * sizeof got[0]), 0) << "statistics, step " << t;
      ASSERT_TRUE(planes == others[i].Bytes()) << "planes, step " << t;
      totals->states += kElements;
    }
    totals->blocks += (kElements + kBlock - 1) / kBlock;
    for (const TileStatistics& s : wanted) totals->rejected += s.rejected;
  }
}

template <class Walk>
void ForEveryForm(const Walk& walk) {
  for (size_t k = 0; k < ScalarTables().kernels.size(); ++k) {
    for (size_t w = 0; w < WireFormats().size(); ++w) {
      if (!WireFormats()[w].gradient) continue;
      for (const bool stochastic : {false, true}) {
        const Kernel& kernel = ScalarTables().kernels[k];
        SCOPED_TRACE(NameOf(kernel) + " gradients " + WireFormats()[w].name +
                     (stochastic ? " stochastic" : " nearest"));
        walk(k, w, stochastic);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

Totals WalkAll(const Gradients& gradients, double weight_scale) {
  Totals totals;
  ForEveryForm([&](size_t k, size_t wire, bool stochastic) {
    ExpectSameBits(ScalarTables().kernels[k], VariantsOf(k), gradients[wire], stochastic, weight_scale, &totals);
  });
  std::cout << totals.states << " states compared, " << totals.rejected << " of " << totals.blocks
            << " blocks rejected\n";
  return totals;
}

TEST(IdentityTest, NoTwoUnitsShareAFunction) {
  std::vector<const IsaTables*> units(UsableIsas().begin(), UsableIsas().end());
  units.push_back(&UnoptimizedTables());
  std::set<void (*)(const Update&, uint64_t, uint64_t, TileStatistics*)> updates;
  std::set<bool (*)(std::byte* const*, WireIndex, const void*, uint64_t, uint64_t)> loads;
  for (const IsaTables* unit : units) {
    for (size_t i = 0; i < unit->kernels.size(); ++i) {
      EXPECT_EQ(NameOf(unit->kernels[i]), NameOf(ScalarTables().kernels[i]));
      updates.insert(unit->kernels[i].update);
    }
    for (const MasterFormat& master : unit->masters) loads.insert(master.load);
  }
  EXPECT_EQ(updates.size(), units.size() * Kernels().size());
  EXPECT_EQ(loads.size(), units.size() * MasterFormats().size());
  EXPECT_EQ(Kernels().data(), UsableIsas().back()->kernels.data());
  EXPECT_LE(Kernels().size(), 90u);
}

TEST(IdentityTest, OrdinaryGradientsGiveTheSameBits) {
  const Totals totals = WalkAll(Gradients(false), 0.02);
  EXPECT_EQ(totals.rejected, 0u);
  EXPECT_GE(totals.states, Kernels().size() * kFormsOfEach * kElements * kSteps);
}

TEST(IdentityTest, AdversarialGradientsGiveTheSameBits) {
  const Totals totals = WalkAll(Gradients(true), 1);
  EXPECT_GT(totals.rejected, 0u);
  EXPECT_LT(totals.rejected * 5, totals.blocks) << "most blocks must take the ordinary path";
  EXPECT_GE(totals.states, Kernels().size() * kFormsOfEach * kElements * kSteps);
}

TEST(IdentityTest, UnoptimizedCodeGivesTheSameBits) {
  const Gradients gradients(true);
  Totals totals;
  ForEveryForm([&](size_t k, size_t wire, bool stochastic) {
    if (wire != k % 3) return;  // a format each: this code is slow
    const std::vector<Variant> slow = {{&UnoptimizedTables().kernels[k], &StepAtOnce, "unoptimized"}};
    const std::vector<Payload> two(gradients[wire].begin(), gradients[wire].begin() + 2);
    ExpectSameBits(ScalarTables().kernels[k], slow, two, stochastic, 1, &totals);
  });
  EXPECT_GE(totals.states, Kernels().size() * 2 * kElements);
}

TEST(IdentityTest, ProbesGiveTheUnoptimizedCodesBits) {
  const auto gradient = [](uint64_t t) { return Encoded(FindWireFormat("bf16"), Adversarial(t, kElements)); };
  for (const IsaTables* isa : UsableIsas()) {
    for (size_t k = 0; k < isa->kernels.size(); ++k) {
      const Kernel &kernel = isa->kernels[k], &slow = UnoptimizedTables().kernels[k];
      if (kernel.curvature == nullptr) continue;
      SCOPED_TRACE(NameOf(kernel) + " " + isa->name);
      Tensor tensor(kernel, kElements);
      tensor.Step(gradient(1), {.t = 1});
      Kept a(kElements), b(kElements);
      for (const uint64_t t : {2, 3}) {
        EXPECT_TRUE(SameBits(ProbeCurvature(kernel, &tensor, gradient(t), {.t = 1, .clip = 0.3f}, &a),
                             ProbeCurvature(slow, &tensor, gradient(t), {.t = 1, .clip = 0.3f}, &b)));
        EXPECT_TRUE(a == b);
      }
    }
  }
}

// Loads `values` and serves them in every format: all that the master's codec writes, one after the other.
std::vector<std::byte> LoadedAndServed(const MasterFormat& master, const std::vector<float>& values) {
  const uint64_t n = values.size(), row_length = 1000;
  std::vector<std::byte> planes[2], all;
  std::byte* at[2] = {};
  for (size_t p = 0; p < master.planes.size(); ++p) {
    planes[p].resize(PlaneBytes(master.planes[p], n));
    at[p] = planes[p].data();
  }
  EXPECT_TRUE(master.load(at, FindWireFormat("fp32"), values.data(), 0, n));
  for (const auto& plane : planes) all.insert(all.end(), plane.begin(), plane.end());
  std::vector<float> scales;
  for (uint64_t first = 0; first < n; first += row_length) {
    scales.push_back(master.absmax(at, first, std::min(n, first + row_length)));
  }
  for (size_t wire = 0; wire < WireFormats().size(); ++wire) {
    if (!WireFormats()[wire].serving) continue;
    std::vector<std::byte> served(n * WireFormats()[wire].bytes);
    master.encode_weights(at, static_cast<WireIndex>(wire), scales.data(), row_length, served.data(), 0, n);
    all.insert(all.end(), served.begin(), served.end());
  }
  return all;
}

TEST(IdentityTest, LoadingAndServingGiveTheSameBits) {
  std::vector<float> values = Adversarial(9, kElements);
  for (float& x : values) x = std::isfinite(x) ? x : 0.0f;
  for (const IsaTables* isa : UsableIsas()) {
    for (size_t i = 0; i < isa->masters.size(); ++i) {
      const MasterFormat &fast = isa->masters[i], &slow = UnoptimizedTables().masters[i];
      EXPECT_TRUE(LoadedAndServed(fast, values) == LoadedAndServed(slow, values)) << fast.name << " " << isa->name;
    }
  }
}

// Codes of a moment, and what they decode to.
std::vector<std::byte> EncodedMoment(const MomentCodec& codec, const std::vector<float>& values, bool stochastic) {
  std::vector<std::vector<std::byte>> planes;
  std::vector<std::byte*> at;
  for (const Plane& plane : codec.planes) {
    planes.emplace_back(PlaneBytes(plane, values.size()));
    at.push_back(planes.back().data());
  }
  EXPECT_TRUE(codec.encode(at.data(), values.data(), values.size(), 7, stochastic));
  std::vector<float> decoded(values.size());
  codec.decode(at.data(), decoded.data(), decoded.size());
  std::vector<std::byte> all(decoded.size() * sizeof decoded[0]);
  std::memcpy(all.data(), decoded.data(), all.size());
  for (const auto& plane : planes) all.insert(all.end(), plane.begin(), plane.end());
  return all;
}

TEST(IdentityTest, MomentCodecsGiveTheSameBits) {
  for (const IsaTables* isa : UsableIsas()) {
    for (size_t i = 0; i < isa->states.size(); ++i) {
      const MomentFormat &fast = isa->states[i], &slow = UnoptimizedTables().states[i];
      const double scale = std::min(1.0, std::sqrt(static_cast<double>(fast.momentum.largest)) * 1e-3);
      std::vector<float> m = Normals(3).Vector(kElements, scale), v = m;
      for (float& x : v) x *= x;
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(std::string(fast.name) + " " + isa->name);
        EXPECT_TRUE(EncodedMoment(fast.momentum, m, stochastic) == EncodedMoment(slow.momentum, m, stochastic));
        EXPECT_TRUE(EncodedMoment(fast.variance, v, stochastic) == EncodedMoment(slow.variance, v, stochastic));
      }
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
