// The payload formats against a reference in double.
#include "kernels/formats/wire.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "tests/kernels/tensor.h"
#include "tests/oracle/reference.h"

namespace ballast::kernels {
namespace {

float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }

// Signs of zeros count.
bool SameValue(double a, double b) { return a == b && std::signbit(a) == std::signbit(b); }

template <class Wire>
void ExpectEveryCodeDecodesAndSurvives(int mantissa) {
  const uint32_t infinity = (1u << 15) - (1u << mantissa);
  for (uint32_t code = 0; code < 65536; ++code) {
    const float x = Wire::Decode(static_cast<uint16_t>(code));
    if ((code & 0x7fff) > infinity) {
      ASSERT_TRUE(std::isnan(x)) << code;
      ASSERT_GT(Wire::Encode(x) & 0x7fffu, infinity) << code;
      continue;
    }
    if ((code & 0x7fff) == infinity) {
      ASSERT_EQ(x, (code & 0x8000) != 0 ? -INFINITY : INFINITY);
    } else {
      ASSERT_TRUE(SameValue(static_cast<double>(x), oracle::FromHalf(code, mantissa))) << code;
    }
    ASSERT_EQ(Wire::Encode(x), code);
  }
}

// Every code's value, the middle to the next one, and the fp32 numbers on both sides of each.
template <class Wire, class Oracle>
void ExpectEncodingRoundsAs(Oracle reference, int mantissa) {
  const uint32_t infinity = (1u << 15) - (1u << mantissa);
  for (uint32_t code = 0; code < infinity; ++code) {
    const double here = oracle::FromHalf(code, mantissa);
    const double next = here + oracle::Spacing(here, mantissa, mantissa == 10 ? -14 : -126);
    for (const double x : {here, (here + next) / 2}) {
      const uint32_t middle = std::bit_cast<uint32_t>(static_cast<float>(x));
      for (const uint32_t bits : {middle - 1, middle, middle + 1}) {
        for (const uint32_t sign : {0u, 0x80000000u}) {
          const float in = FromBits(bits & 0x7fffffff) * (sign == 0 ? 1.0f : -1.0f);
          if (!std::isfinite(in)) continue;
          const double out = static_cast<double>(Wire::Decode(Wire::Encode(in)));
          ASSERT_TRUE(SameValue(out, reference(static_cast<double>(in)))) << in << " gives " << out;
        }
      }
    }
  }
}

template <class Wire, class Oracle>
void ExpectRandomPatternsRoundAs(Oracle reference) {
  Normals random(11);
  for (int i = 0; i < 400000; ++i) {
    const float in = FromBits(static_cast<uint32_t>(random.Word()));
    if (!std::isfinite(in)) continue;
    const double out = static_cast<double>(Wire::Decode(Wire::Encode(in)));
    ASSERT_TRUE(SameValue(out, reference(static_cast<double>(in)))) << in << " gives " << out;
  }
}

TEST(WireBf16Test, EveryCodeDecodesAndSurvives) { ExpectEveryCodeDecodesAndSurvives<WireBf16>(7); }
TEST(WireFp16Test, EveryCodeDecodesAndSurvives) { ExpectEveryCodeDecodesAndSurvives<WireFp16>(10); }
TEST(WireBf16Test, RoundsToNearestEvenAroundEveryCode) { ExpectEncodingRoundsAs<WireBf16>(oracle::ToBf16, 7); }
TEST(WireFp16Test, RoundsToNearestEvenAroundEveryCode) { ExpectEncodingRoundsAs<WireFp16>(oracle::ToFp16, 10); }
TEST(WireBf16Test, RandomPatternsRoundToNearestEven) { ExpectRandomPatternsRoundAs<WireBf16>(oracle::ToBf16); }
TEST(WireFp16Test, RandomPatternsRoundToNearestEven) { ExpectRandomPatternsRoundAs<WireFp16>(oracle::ToFp16); }

TEST(WireTest, FiniteValuesBeyondTheRangeSaturate) {
  for (const float x : {FromBits(0x7f7fffff), 1e30f, 65520.0f, 65536.0f}) {
    EXPECT_EQ(WireFp16::Encode(x), 0x7bff);
    EXPECT_EQ(WireFp16::Encode(-x), 0xfbff);
  }
  EXPECT_EQ(WireBf16::Encode(FromBits(0x7f7fffff)), 0x7f7f);
  EXPECT_EQ(WireBf16::Encode(FromBits(0xff7fffff)), 0xff7f);
}

TEST(WireTest, EveryMasterServesEveryFormatFromItsDecodedValue) {
  const std::vector<float> weights = Normals(5).Vector(1000, 3);
  for (const Master& master : Masters()) {
    Tensor tensor(*FindKernel("adamw", master.name, "fp32"), weights.size());
    tensor.SetWeights(weights);
    const std::vector<float> decoded = tensor.Weights();
    const std::byte* planes[] = {tensor.plane(0), tensor.plane(1)};
    std::vector<uint16_t> half(weights.size());
    master.serve(planes, FindWireFormat("fp16"), half.data(), 0, half.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      const double wanted = static_cast<double>(weights[i]);
      ASSERT_NEAR(static_cast<double>(decoded[i]), wanted, std::abs(wanted) * 0x1p-16) << master.name;
      ASSERT_EQ(oracle::FromHalf(half[i], 10), oracle::ToFp16(static_cast<double>(decoded[i]))) << master.name;
    }
  }
}

TEST(WireTest, LoadingFromAPayloadKeepsItsValues) {
  for (const WireFormat& wire : WireFormats()) {
    const WireIndex format = FindWireFormat(wire.name);
    const Payload payload = Encoded(format, Normals(6).Vector(333));
    for (const Master& master : Masters()) {
      Tensor tensor(*FindKernel("adamw", master.name, "fp32"), 333);
      std::byte* planes[] = {tensor.plane(0), tensor.plane(1)};
      ASSERT_TRUE(master.load(planes, format, payload.bytes.data(), 0, 333));
      std::vector<std::byte> again(payload.bytes.size());
      const std::byte* const from[] = {tensor.plane(0), tensor.plane(1)};
      master.serve(from, format, again.data(), 0, 333);
      if (wire.bytes == 2 || master.name != std::string_view("split24")) {
        EXPECT_EQ(again, payload.bytes) << master.name << " " << wire.name;
      }
      EXPECT_TRUE(tensor.GuardsAreIntact());
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
