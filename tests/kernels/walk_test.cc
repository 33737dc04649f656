// Every kernel of the registry with every gradient format and rounding: what holds for all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <thread>
#include <tuple>

#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kSizes[] = {1, 31, 32, 33, 255, 4095, 4097, 12289};
constexpr uint64_t kFewSizes[] = {33, 4097};

bool Same(const std::vector<TileStatistics>& a, const std::vector<TileStatistics>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

// Every kernel x gradient format x rounding, with a trace that names it.
void ForEveryForm(const std::function<void(const Kernel&, WireIndex, bool)>& check) {
  for (const Kernel& kernel : Kernels()) {
    for (const WireIndex format : GradientFormats()) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(NameOf(kernel) + " gradients " + NameOf(format) + (stochastic ? " stochastic" : " nearest"));
        check(kernel, format, stochastic);
      }
    }
  }
}

Tensor Fresh(const Kernel& kernel, uint64_t n) {
  Tensor tensor(kernel, n);
  tensor.SetWeights(Normals(n).Vector(n, 0.02));
  return tensor;
}
// Made once: every kernel is given the same ones.
const Payload& Gradient(WireIndex format, uint64_t n, uint64_t seed) {
  static std::map<std::tuple<WireIndex, uint64_t, uint64_t>, Payload> made;
  Payload& payload = made[{format, n, seed}];
  if (payload.bytes.empty()) payload = Encoded(format, Normals(seed).Vector(n, 0.1));
  return payload;
}

TEST(WalkTest, TileByTileInAnyOrderIsOneCall) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    const bool all = format == FindWireFormat("fp32") || kernel.rule == std::string_view("adamw");
    for (const uint64_t n : all ? std::span<const uint64_t>(kSizes) : std::span<const uint64_t>(kFewSizes)) {
      Tensor whole = Fresh(kernel, n), tiled = Fresh(kernel, n);
      std::mt19937_64 order(n);
      for (uint64_t t = 1; t <= 2; ++t) {
        const StepOptions options{.t = t, .stochastic = stochastic};
        const Payload& grad = Gradient(format, n, n + t);
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
    const Payload& grad = Gradient(format, kElements, 3);
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

TEST(WalkTest, StatisticsChangeNoBitAndFullOnesNoCoreFigure) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    Tensor full = Fresh(kernel, 4300), core = full, off = full;
    for (uint64_t t = 1; t <= 3; ++t) {
      const Payload& grad = Gradient(format, 4300, t);
      const auto a = full.Step(grad, {.t = t, .stochastic = stochastic, .statistics = StatisticsLevel::kFull});
      const auto b = core.Step(grad, {.t = t, .stochastic = stochastic, .statistics = StatisticsLevel::kCore});
      const auto c = off.Step(grad, {.t = t, .stochastic = stochastic, .statistics = StatisticsLevel::kOff});
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_EQ(a[i].grad_sq, b[i].grad_sq);
        ASSERT_EQ(a[i].update_sq, b[i].update_sq);
        ASSERT_EQ(a[i].rms_sq, b[i].rms_sq);
        ASSERT_EQ(a[i].grad_absmax, b[i].grad_absmax);
        ASSERT_EQ(b[i].weight_sq, 0.0f);
        ASSERT_EQ(b[i].stored_dot + b[i].hi_dot, 0.0f);
        ASSERT_EQ(b[i].unchanged + b[i].hi_unchanged + b[i].saturated, 0u);
        ASSERT_EQ(c[i].grad_sq + c[i].update_sq + c[i].rms_sq + c[i].weight_sq + c[i].stored_dot + c[i].hi_dot, 0.0f);
        ASSERT_EQ(c[i].grad_absmax, a[i].grad_absmax);
      }
    }
    EXPECT_EQ(full.Bytes(), core.Bytes());
    EXPECT_EQ(full.Bytes(), off.Bytes());
  });
}

TEST(WalkTest, AReplayGivesTheSameBitsAndAnotherKeyDoesNot) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    Tensor first = Fresh(kernel, 4097), again = Fresh(kernel, 4097), other = Fresh(kernel, 4097);
    for (uint64_t t = 1; t <= 3; ++t) {
      const Payload& grad = Gradient(format, 4097, t);
      first.Step(grad, {.t = t, .stochastic = stochastic});
      again.Step(grad, {.t = t, .stochastic = stochastic});
      other.Step(grad, {.t = t, .tensor_key = 43, .stochastic = stochastic});
    }
    EXPECT_EQ(first.Bytes(), again.Bytes());
    const std::string_view master = kernel.master, state = kernel.state;
    const bool collage = master == "mcf";
    const bool rounds = !collage && (master == "split24" || master == "bf16" || master == "mcf8" || state == "bf16" ||
                                     state == "companded8");
    EXPECT_EQ(first.Bytes() != other.Bytes(), stochastic && rounds);
  });
}

// A small scale is the loss scale undone.
TEST(WalkTest, TheGradientScaleIsAppliedBeforeAnythingElse) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    // Multiples of 2^-9 below 1/2, so that each format has them and 256 times them.
    std::vector<float> grad = Normals(4).Vector(1000, 0.1);
    for (float& g : grad) g = static_cast<float>(static_cast<int>(g * 64) % 4) / 64;
    Tensor plain = Fresh(kernel, 1000), scaled = plain;
    const auto a = plain.Step(Encoded(format, grad), {.stochastic = stochastic});
    for (float& g : grad) g *= 256;
    const auto b = scaled.Step(Encoded(format, grad), {.stochastic = stochastic, .grad_scale = 0x1p-8f});
    EXPECT_TRUE(Same(a, b));
    EXPECT_EQ(plain.Bytes(), scaled.Bytes());
  });
}

// Past the end lie zeros: all bytes are 0, but that the map of dynamic8 has its zero at code 127 of m.
bool IsPadding(const Kernel& kernel, const Plane& plane, std::byte byte) {
  const bool map =
      kernel.state == std::string_view("dynamic8") && plane.kind == PlaneKind::kMomentum && plane.bytes == 1;
  return byte == std::byte{0} || (map && byte == std::byte{127});
}

TEST(WalkTest, ThePaddingStaysZero) {
  ForEveryForm([](const Kernel& kernel, WireIndex format, bool stochastic) {
    for (const uint64_t n : {1, 33, 255, 4097}) {
      Tensor tensor = Fresh(kernel, n);
      for (uint64_t t = 1; t <= 2; ++t) tensor.Step(Gradient(format, n, t), {.t = t, .stochastic = stochastic});
      for (size_t p = 0; p < kernel.planes.size(); ++p) {
        const Plane& plane = kernel.planes[p];
        const uint64_t used = (n + plane.per - 1) / plane.per * plane.bytes;
        const std::byte* pad = tensor.plane(p) + used;
        const std::byte* end = tensor.plane(p) + PlaneBytes(plane, n);
        ASSERT_TRUE(std::all_of(pad, end, [&](std::byte b) { return IsPadding(kernel, plane, b); })) << plane.name;
      }
    }
  });
}

}  // namespace
}  // namespace ballast::kernels
