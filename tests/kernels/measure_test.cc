// What a gradient measures before its update, and its clipping, in every instruction set against a reference written
// out here.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "kernels/cpu/tables.h"
#include "tests/kernels/adversarial.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 3 * kTile + 1000;
constexpr float kScales[] = {1.0f, 1.0f / 3, 0x1p-16f};

// The elements as sent; NaN and infinities stay what they are.
std::vector<float> Decoded(const Payload& payload, uint64_t n) {
  const WireFormat& wire = WireFormats()[static_cast<size_t>(payload.format)];
  const oracle::Float& format = *FloatOf(wire);
  const int bits = static_cast<int>(wire.bytes) * 8;
  const uint32_t sign = 1u << (bits - 1), largest = oracle::CodeOf(format.largest, format, bits);
  std::vector<float> values(n);
  for (uint64_t i = 0; i < n; ++i) {
    uint32_t code = 0;
    std::memcpy(&code, payload.bytes.data() + i * wire.bytes, wire.bytes);
    const bool finite = (code & (sign - 1)) <= largest;
    values[i] = finite ? static_cast<float>(oracle::ValueOf(code, format, bits)) : NAN;
  }
  return values;
}

// One rounding: the product of two fp32 numbers is exact in double.
float Rounded(float a, float b) { return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)); }

// 16 rows of 256 lanes, added in row order, then the tree over the lanes. Blocks with an element that is not finite are
// left out.
TileStatistics ReferenceTile(std::span<const float> grad) {
  TileStatistics out{};
  std::vector<float> sums(256);
  for (size_t block = 0; block < grad.size(); block += kBlock) {
    const auto values = grad.subspan(block, std::min<size_t>(kBlock, grad.size() - block));
    uint32_t bad = 0;
    for (const float g : values) {
      bad += std::isfinite(g) ? 0 : 1;
      if (std::isfinite(g)) out.grad_absmax = std::max(out.grad_absmax, std::abs(g));
    }
    out.nonfinite += bad;
    for (size_t i = 0; bad == 0 && i < values.size(); ++i) sums[(block + i) % 256] += Rounded(values[i], values[i]);
  }
  for (size_t stride = 1; stride < 256; stride *= 2) {
    for (size_t lane = 0; lane < 256; lane += 2 * stride) sums[lane] += sums[lane + stride];
  }
  out.grad_sq = sums[0];
  return out;
}

std::vector<TileStatistics> Reference(const Payload& payload, uint64_t n, float scale) {
  std::vector<float> grad = Decoded(payload, n);
  for (float& g : grad) g = Rounded(g, scale);
  std::vector<TileStatistics> tiles;
  for (uint64_t first = 0; first < n; first += kTile) {
    tiles.push_back(ReferenceTile(std::span(grad).subspan(first, std::min(kTile, n - first))));
  }
  return tiles;
}

void ExpectSame(const std::vector<TileStatistics>& wanted, const std::vector<TileStatistics>& got) {
  ASSERT_EQ(wanted.size(), got.size());
  for (size_t tile = 0; tile < wanted.size(); ++tile) {
    EXPECT_EQ(std::memcmp(&wanted[tile], &got[tile], sizeof got[tile]), 0)
        << "tile " << tile << ": " << got[tile].grad_sq << ", largest " << got[tile].grad_absmax << ", not finite "
        << got[tile].nonfinite << "; wanted " << wanted[tile].grad_sq << ", " << wanted[tile].grad_absmax << ", "
        << wanted[tile].nonfinite;
  }
}

TEST(MeasureTest, EveryLaneGivesTheReferencesBits) {
  for (const bool adversarial : {false, true}) {
    const auto values = adversarial ? Adversarial(5, kElements) : Normals(5).Vector(kElements, 1e-3);
    for (const WireIndex format : GradientFormats()) {
      const Payload payload = Encoded(format, values);
      for (const float scale : kScales) {
        for (const uint64_t n : {kElements, kTile, kTile + 1, uint64_t{300}, uint64_t{1}}) {
          const std::vector<TileStatistics> wanted = Reference(payload, n, scale);
          for (const IsaTables* isa : UsableIsas()) {
            SCOPED_TRACE(std::string(NameOf(format)) + " " + isa->name + ", " + std::to_string(n) + " elements times " +
                         std::to_string(scale));
            std::vector<TileStatistics> got(wanted.size());
            isa->wires[static_cast<size_t>(format)].measure(payload.bytes.data(), n, scale, 0, got.size(), got.data());
            ExpectSame(wanted, got);
          }
        }
      }
    }
  }
}

// The norm that a verdict uses is therefore the norm that is reported.
TEST(MeasureTest, ItIsWhatTheUpdatesStatisticsSay) {
  const Kernel& kernel = *FindKernel("adamw", "split24", "companded8");
  std::vector<float> values = Normals(6).Vector(kElements, 1e-3);
  values[5] = NAN, values[kTile + 77] = INFINITY, values[kElements - 1] = -INFINITY;
  for (const WireIndex format : GradientFormats()) {
    const Payload payload = Encoded(format, values);
    Tensor tensor(kernel, kElements);
    const auto updated = tensor.Step(payload, {.statistics = StatisticsLevel::kCore, .grad_scale = 0.5f});
    std::vector<TileStatistics> measured(updated.size());
    WireFormats()[static_cast<size_t>(format)].measure(payload.bytes.data(), kElements, 0.5f, 0, measured.size(),
                                                       measured.data());
    for (size_t tile = 0; tile < measured.size(); ++tile) {
      EXPECT_EQ(measured[tile].grad_sq, updated[tile].grad_sq) << NameOf(format) << " " << tile;
      EXPECT_EQ(measured[tile].grad_absmax, updated[tile].grad_absmax) << NameOf(format) << " " << tile;
      EXPECT_EQ(measured[tile].nonfinite, updated[tile].nonfinite) << NameOf(format) << " " << tile;
    }
  }
}

// Two roundings: the clipped gradient, made here and sent as fp32, gives the same bits.
TEST(MeasureTest, AClippedUpdateIsThatOfTheClippedGradient) {
  constexpr float kScale = 1.0f / 3, kClip = 0.3f;
  for (const IsaTables* isa : UsableIsas()) {
    for (const Kernel& kernel : isa->kernels) {
      for (const WireIndex format : GradientFormats()) {
        SCOPED_TRACE(NameOf(kernel) + " gradients " + NameOf(format) + " " + isa->name);
        const Payload payload = Encoded(format, Normals(7).Vector(kTile + 100, 1e-3));
        std::vector<float> clipped = Decoded(payload, kTile + 100);
        for (float& g : clipped) g = Rounded(Rounded(g, kScale), kClip);
        Tensor a(kernel, clipped.size());
        a.SetWeights(Normals(1).Vector(clipped.size(), 0.02));
        Tensor b = a;
        const auto wanted = a.Step(Encoded(FindWireFormat("fp32"), clipped), {});
        ExpectSame(wanted, b.Step(payload, {.grad_scale = kScale, .clip = kClip}));
        ASSERT_TRUE(a.Bytes() == b.Bytes());
      }
    }
  }
}

// A coefficient of 0 makes the gradient 0; blocks that were not finite before stay refused.
TEST(MeasureTest, ACoefficientOfZeroLeavesNoGradientAndHidesNone) {
  const Kernel& kernel = *FindKernel("sgd", "fp32", "fp32");
  std::vector<float> values(2 * kBlock, 3.0f);
  values[kBlock] = INFINITY;
  Tensor tensor(kernel, values.size());
  const TileStatistics s = tensor.Step(Encoded(FindWireFormat("fp32"), values), {.clip = 0})[0];
  EXPECT_EQ(s.grad_absmax, 0);
  EXPECT_EQ(s.grad_sq, 0);
  EXPECT_EQ(s.nonfinite, 1u);
  EXPECT_EQ(s.rejected, 1u);
}

}  // namespace
}  // namespace ballast::kernels
