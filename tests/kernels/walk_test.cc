// Every kernel of the registry with every gradient format and rounding: what holds for all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <thread>

#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kSizes[] = {1, 31, 32, 33, 255, 4095, 4097, 12289};

bool Same(const std::vector<TileStatistics>& a, const std::vector<TileStatistics>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

// Every kernel x format x rounding, with a trace that names it.
void ForEveryForm(const std::function<void(const Kernel&, WireIndex, bool)>& check) {
  for (const Kernel& kernel : Kernels()) {
    for (const WireFormat& wire : WireFormats()) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(NameOf(kernel) + " gradients " + wire.name + (stochastic ? " stochastic" : " nearest"));
        check(kernel, FindWireFormat(wire.name), stochastic);
      }
    }
  }
}

Tensor Fresh(const Kernel& kernel, uint64_t n) {
  Tensor tensor(kernel, n);
  tensor.SetWeights(Normals(n).Vector(n, 0.02));
  return tensor;
}
Payload Gradient(WireIndex format, uint64_t n, uint64_t seed) { return Encoded(format, Normals(seed).Vector(n, 0.1)); }

TEST(WalkTest, TileByTileInAnyOrderIsOneCall) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    for (const uint64_t n : kSizes) {
      Tensor whole = Fresh(kernel, n), tiled = Fresh(kernel, n);
      std::mt19937_64 order(n);
      for (uint64_t t = 1; t <= 2; ++t) {
        const StepOptions options{.t = t, .stochastic = stochastic};
        const Payload grad = Gradient(format, n, n + t);
        const std::vector<TileStatistics> wanted = whole.Step(grad, options);
        std::vector<TileStatistics> got(tiled.tiles());
        std::vector<uint64_t> tiles(tiled.tiles());
        for (uint64_t i = 0; i < tiles.size(); ++i) tiles[i] = i;
        std::shuffle(tiles.begin(), tiles.end(), order);
        const Update update = tiled.MakeUpdate(grad, options);
        for (const uint64_t tile : tiles) kernel.update(update, tile, tile + 1, &got[tile]);
        ASSERT_TRUE(Same(wanted, got)) << n;
      }
      ASSERT_EQ(whole.Bytes(), tiled.Bytes()) << n;
      ASSERT_TRUE(whole.GuardsAreIntact() && tiled.GuardsAreIntact()) << n;
    }
  });
}

TEST(WalkTest, TwoThreadsGiveTheBitsOfOne) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    constexpr uint64_t kElements = 5 * kTile + 77;
    Tensor one = Fresh(kernel, kElements), two = Fresh(kernel, kElements);
    const Payload grad = Gradient(format, kElements, 3);
    const StepOptions options{.stochastic = stochastic};
    const std::vector<TileStatistics> wanted = one.Step(grad, options);
    std::vector<TileStatistics> got(two.tiles());
    const Update update = two.MakeUpdate(grad, options);
    std::thread other([&] { kernel.update(update, 2, 6, &got[2]); });
    kernel.update(update, 0, 2, got.data());
    other.join();
    EXPECT_TRUE(Same(wanted, got));
    EXPECT_EQ(one.Bytes(), two.Bytes());
  });
}

TEST(WalkTest, FullStatisticsChangeNoBitAndNoCoreFigure) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    Tensor full = Fresh(kernel, 12289), core = Fresh(kernel, 12289);
    for (uint64_t t = 1; t <= 3; ++t) {
      const Payload grad = Gradient(format, 12289, t);
      const auto a = full.Step(grad, {.t = t, .stochastic = stochastic, .full = true});
      const auto b = core.Step(grad, {.t = t, .stochastic = stochastic, .full = false});
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_EQ(a[i].grad_sq, b[i].grad_sq);
        ASSERT_EQ(a[i].update_sq, b[i].update_sq);
        ASSERT_EQ(a[i].rms_sq, b[i].rms_sq);
        ASSERT_EQ(a[i].grad_absmax, b[i].grad_absmax);
        ASSERT_EQ(b[i].weight_sq, 0.0f);
        ASSERT_EQ(b[i].unchanged + b[i].saturated, 0u);
      }
    }
    EXPECT_EQ(full.Bytes(), core.Bytes());
  });
}

TEST(WalkTest, AReplayGivesTheSameBitsAndAnotherKeyDoesNot) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    Tensor first = Fresh(kernel, 4097), again = Fresh(kernel, 4097), other = Fresh(kernel, 4097);
    for (uint64_t t = 1; t <= 3; ++t) {
      const Payload grad = Gradient(format, 4097, t);
      first.Step(grad, {.t = t, .stochastic = stochastic});
      again.Step(grad, {.t = t, .stochastic = stochastic});
      other.Step(grad, {.t = t, .tensor_key = 43, .stochastic = stochastic});
    }
    EXPECT_EQ(first.Bytes(), again.Bytes());
    const bool rounds = kernel.state != std::string_view("fp32") || kernel.master == std::string_view("split24");
    EXPECT_EQ(first.Bytes() != other.Bytes(), stochastic && rounds);
  });
}

// A small scale for bf16 and fp16 gradients is the loss scale undone.
TEST(WalkTest, TheGradientScaleIsAppliedBeforeAnythingElse) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    std::vector<float> grad = Normals(4).Vector(1000, 0.1);
    Tensor plain = Fresh(kernel, 1000), scaled = Fresh(kernel, 1000);
    const auto a = plain.Step(Encoded(format, grad), {.stochastic = stochastic});
    for (float& g : grad) g *= 256;
    const auto b = scaled.Step(Encoded(format, grad), {.stochastic = stochastic, .grad_scale = 0x1p-8f});
    // fp16's subnormals gain digits from the scale.
    if (format == FindWireFormat("fp16")) {
      EXPECT_NEAR(a[0].grad_sq, b[0].grad_sq, a[0].grad_sq * 1e-5f);
    } else {
      EXPECT_TRUE(Same(a, b));
      EXPECT_EQ(plain.Bytes(), scaled.Bytes());
    }
  });
}

TEST(WalkTest, ThePaddingStaysZero) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    for (const uint64_t n : kSizes) {
      Tensor tensor = Fresh(kernel, n);
      for (uint64_t t = 1; t <= 3; ++t) tensor.Step(Gradient(format, n, t), {.t = t, .stochastic = stochastic});
      for (size_t p = 0; p < kernel.planes.size(); ++p) {
        const Plane& plane = kernel.planes[p];
        const uint64_t used = (n + plane.per - 1) / plane.per * plane.bytes;
        const std::byte* pad = tensor.plane(p) + used;
        const std::byte* end = tensor.plane(p) + PlaneBytes(plane, n);
        ASSERT_TRUE(std::all_of(pad, end, [](std::byte b) { return b == std::byte{0}; })) << plane.name << " " << n;
      }
    }
  });
}

TEST(RegistryTest, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (const Kernel& kernel : Kernels()) {
    EXPECT_TRUE(names.insert(NameOf(kernel)).second) << NameOf(kernel);
    EXPECT_EQ(FindKernel(kernel.rule, kernel.master, kernel.state), &kernel);
    EXPECT_NE(FindMaster(kernel.master), nullptr);
    std::set<std::string> planes, hypers;
    for (const Plane& p : kernel.planes) EXPECT_TRUE(planes.insert(p.name).second) << p.name;
    for (const Hyper& h : kernel.hypers) EXPECT_TRUE(hypers.insert(h.name).second) << h.name;
    EXPECT_LE(kernel.planes.size(), static_cast<size_t>(kMaxPlanes));
  }
  EXPECT_EQ(Kernels().size(), RuleNames().size() * Masters().size() * StateNames().size());
  EXPECT_EQ(FindKernel("adamw", "split24", "nothing"), nullptr);
  EXPECT_EQ(FindMaster(""), nullptr);
  EXPECT_EQ(FindWireFormat("fp12"), -1);
}

TEST(RegistryTest, AMastersPlanesComeFirstInItsKernels) {
  for (const Kernel& kernel : Kernels()) {
    const Master& master = *FindMaster(kernel.master);
    for (size_t p = 0; p < master.planes.size(); ++p) {
      EXPECT_STREQ(kernel.planes[p].name, master.planes[p].name);
      EXPECT_EQ(kernel.planes[p].kind, Kind::kWeights);
      EXPECT_EQ(kernel.planes[p].bytes, master.planes[p].bytes);
      EXPECT_EQ(kernel.planes[p].per, master.planes[p].per);
    }
  }
}

TEST(RegistryTest, DefaultHyperparametersAreInRange) {
  for (const Kernel& kernel : Kernels()) {
    for (const Hyper& h : kernel.hypers) {
      EXPECT_TRUE(h.open_min ? h.value > h.min : h.value >= h.min) << h.name;
      EXPECT_TRUE(h.open_max ? h.value < h.max : h.value <= h.max) << h.name;
      EXPECT_GT(std::string(h.doc).size(), 4u) << h.name;
    }
  }
}

// Relative error of a constant: RN to fp32 is 2^-24; the rest allows for double's cancellation in 1 - b^t.
TEST(RegistryTest, AdamWConstantsAgreeWithLongDouble) {
  const Kernel& kernel = *FindKernel("adamw", "fp32", "fp32");
  for (const long double b2 : {0.0L, 0.9L, 0.999L, 0.9999L}) {
    for (const uint64_t t : {1ull, 2ull, 7ull, 100ull, 12345ull, 100000000ull}) {
      std::vector<double> hyper = DefaultHypers(kernel);
      std::vector<long double> h(5);
      for (size_t i = 0; i < 5; ++i) {
        if (kernel.hypers[i].name == std::string_view("beta2")) hyper[i] = static_cast<double>(b2);
        h[i] = static_cast<long double>(hyper[i]);
      }
      const auto of = [&](std::string_view name) {
        for (size_t i = 0; i < 5; ++i) {
          if (kernel.hypers[i].name == name) return h[i];
        }
        return std::numeric_limits<long double>::quiet_NaN();
      };
      const long double bias1 = 1 - std::pow(of("beta1"), static_cast<long double>(t));
      const long double bias2 = 1 - std::pow(of("beta2"), static_cast<long double>(t));
      const long double decay = of("lr") * of("weight_decay"), eps = of("eps");
      const long double wanted[] = {of("beta1"), 1 - of("beta1"),   of("beta2"), 1 - of("beta2"), 1 / std::sqrt(bias2),
                                    eps,         -of("lr") / bias1, 1 - decay,   -decay,          1 / bias2,
                                    eps * eps};
      float got[kMaxConstants] = {};
      kernel.prepare(hyper, t, got);
      for (size_t i = 0; i < std::size(wanted); ++i) {
        const double exact = static_cast<double>(wanted[i]);
        EXPECT_NEAR(static_cast<double>(got[i]), exact, std::abs(exact) * 0x1.01p-24) << i << " t " << t;
      }
    }
  }
}

TEST(RegistryTest, EpsNeverVanishesInFp32) {
  const Kernel& kernel = *FindKernel("adamw", "fp32", "fp32");
  std::vector<double> hyper = DefaultHypers(kernel);
  for (size_t i = 0; i < hyper.size(); ++i) {
    if (kernel.hypers[i].name == std::string_view("eps")) hyper[i] = 1e-300;
  }
  Tensor tensor(kernel, 64);
  const auto stats = tensor.Step(Encoded(0, std::vector<float>(64, 0.0f)), {.hyper = hyper});
  EXPECT_EQ(stats[0].rejected, 0u);
  EXPECT_EQ(stats[0].rms_sq, 0.0f);
}

}  // namespace
}  // namespace ballast::kernels
