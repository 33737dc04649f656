// companded8's levels, codes and rounding against their definition.
#include "kernels/formats/companded8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "tests/kernels/tensor.h"
#include "tests/oracle/reference.h"

namespace ballast::kernels {
namespace {

using Lane = ScalarLane;
using Momentum = Companded8Signed::Block<Lane>;
using Variance = Companded8NonNegative::Block<Lane>;

// A level takes three roundings of 2^-24 each, squared where it is v's; where it is subnormal they are of one spacing.
double LevelBound(double level) { return std::abs(level) * 0x1p-21 + 0x1p-149; }

double ScaleOf(uint32_t stored) { return static_cast<double>(std::bit_cast<float>(stored << 16)); }
double Decoded(const Momentum& block, int k) {
  return static_cast<double>(block.Decode(static_cast<uint32_t>(k) & 0xff));
}
double Decoded(const Variance& block, int k) { return static_cast<double>(block.Decode(static_cast<uint32_t>(k))); }

// Stored scales from 1e-30 to 2^119: all 128 mantissas of every third exponent.
std::vector<uint32_t> SampledScales() {
  std::vector<uint32_t> scales;
  const uint32_t least = std::bit_cast<uint32_t>(1e-30f) >> 16, most = (127 + 119) << 7;
  for (uint32_t exponent = least >> 7; exponent <= most >> 7; exponent += exponent + 3 > most >> 7 ? 1 : 3) {
    for (uint32_t mantissa = 0; mantissa < 128; ++mantissa) {
      const uint32_t scale = exponent << 7 | mantissa;
      if (scale >= least && scale <= most) scales.push_back(scale);
    }
  }
  return scales;
}

TEST(Companded8Test, LevelsAreThoseOfTheDefinition) {
  for (const uint32_t stored : {0x3f80u, 0x3fabu, 0x2000u, 0x5a7fu, (127u + 119u) << 7}) {
    const Momentum m(stored);
    const Variance v(stored);
    for (int k = -127; k <= 127; ++k) {
      const double wanted = oracle::MomentumLevel(k, ScaleOf(stored));
      ASSERT_NEAR(Decoded(m, k), wanted, LevelBound(wanted));
    }
    for (int k = 0; k <= 255; ++k) {
      const double wanted = oracle::VarianceLevel(k, ScaleOf(stored));
      if (wanted > 1e38) continue;
      ASSERT_NEAR(Decoded(v, k), wanted, LevelBound(wanted));
    }
  }
}

TEST(Companded8Test, LevelsRiseStrictlyAndMomentumIsOdd) {
  for (const uint32_t stored : SampledScales()) {
    const Momentum m(stored);
    const Variance v(stored);
    for (int k = -127; k < 127; ++k) ASSERT_LT(Decoded(m, k), Decoded(m, k + 1)) << stored << " " << k;
    for (int k = 0; k <= 127; ++k) ASSERT_EQ(Decoded(m, -k), -Decoded(m, k));
    EXPECT_EQ(Decoded(m, 127), ScaleOf(stored));
    if (ScaleOf(stored) < 1e-18 || ScaleOf(stored) > 1e18) continue;  // where squares leave fp32
    for (int k = 0; k < 255; ++k) ASSERT_LT(Decoded(v, k), Decoded(v, k + 1)) << stored << " " << k;
  }
}

TEST(Companded8Test, EveryDecodedLevelEncodesToItsCodeWhenNearest) {
  for (const uint32_t stored : SampledScales()) {
    const Momentum m(stored);
    const Variance v(stored);
    for (int k = -127; k <= 127; ++k) {
      const uint32_t code = static_cast<uint32_t>(k) & 0xff;
      ASSERT_EQ(m.Encode(m.Decode(code), 0, false), code) << stored;
    }
    for (uint32_t k = 1; k <= 255; ++k) {
      const float root = static_cast<float>(k) * (std::bit_cast<float>(stored << 16) / 255.0f);
      ASSERT_EQ(v.Encode(root, 0, false), k) << stored;
    }
  }
}

TEST(Companded8Test, TheLargestMagnitudeNeverPassesTheLastCode) {
  for (const uint32_t stored : SampledScales()) {
    const float a = std::bit_cast<float>(stored << 16);
    for (const bool stochastic : {false, true}) {
      for (const uint32_t random : {0u, 0xffffffffu}) {
        ASSERT_EQ(Momentum(stored).Encode(a, random, stochastic), 127u);
        ASSERT_EQ(Momentum(stored).Encode(-a, random, stochastic), 129u);
        ASSERT_GE(Variance(stored).Encode(a, random, stochastic), 254u);
        ASSERT_LE(Variance(stored).Encode(a, random, stochastic), 255u);
      }
    }
  }
}

// What the clamp is for: 11 of a binade's 128 scales pass 255 when multiplied by their rounded inverse.
TEST(Companded8Test, TheLargestRootStaysBelowCode256WhereItsPositionRoundsBeyond255) {
  for (const uint32_t exponent : {60u, 127u, 128u, 200u}) {
    int beyond = 0;
    for (uint32_t stored = exponent << 7; stored < (exponent + 1) << 7; ++stored) {
      const float a = std::bit_cast<float>(stored << 16);
      if (a * (255.0f / a) <= 255.0f) continue;
      ++beyond;
      for (const bool stochastic : {false, true}) EXPECT_EQ(Variance(stored).Encode(a, 0u, stochastic), 255u) << stored;
    }
    EXPECT_EQ(beyond, 11) << exponent;
  }
}

// All positions of random bits: the share that goes up is the one that makes the decoded value's mean the value.
template <class Block>
void ExpectUnbiased(const Block& block, int k, double part, int shift, bool is_root) {
  const double low = Decoded(block, k), high = Decoded(block, k + 1);
  const double value = low + part * (high - low);
  const float in = static_cast<float>(is_root ? std::sqrt(value) : value);
  double sum = 0;
  for (uint32_t r = 0; r < 65536; ++r) {
    const int code = static_cast<int>(block.Encode(in, r << shift, true));
    ASSERT_TRUE(code == k || code == k + 1) << code << " for " << k;
    sum += code == k ? low : high;
  }
  // 2^-16 of the step for the grid of u; the rest is fp32 in the comparison, a few roundings of values up to `high`.
  const double bound = (high - low) * 0x1p-15 + high * 0x1p-20;
  ASSERT_NEAR(sum / 65536, value, bound) << "code " << k << " part " << part;
}

TEST(Companded8Test, StochasticRoundingKeepsTheExpectation) {
  for (const uint32_t stored : {0x3f80u, 0x3f9du, 0x33c1u, 0x4a7fu}) {
    for (const double part : {0.03, 0.5, 0.91}) {
      for (const int k : {0, 1, 2, 17, 63, 100, 125, 126}) {
        ExpectUnbiased(Momentum(stored), k, part, 0, false);
        ExpectUnbiased(Variance(stored), 2 * k, part, 16, true);
      }
    }
  }
}

TEST(Companded8Test, BelowTheFloorOfTheVarianceTheFloorWins) {
  const Variance block(0x3f80);
  for (const double root : {0.0, 0.1, 0.3, 0.499}) {
    for (uint32_t r = 0; r < 65536; r += 97) {
      ASSERT_EQ(block.Encode(static_cast<float>(root / 255), r << 16, true), 0u);
    }
  }
  EXPECT_NEAR(Decoded(block, 0), 0.25 / 255 / 255, 1e-12);
}

TEST(Companded8Test, ABlockOfZerosIsAllZeroAndStaysSo) {
  for (const uint32_t random : {0u, 0xffffffffu}) {
    for (const bool stochastic : {false, true}) {
      for (const float zero : {0.0f, -0.0f}) EXPECT_EQ(Momentum(0).Encode(zero, random, stochastic), 0u);
      EXPECT_EQ(Variance(0).Encode(0.0f, random, stochastic), 0u);
    }
  }
  EXPECT_EQ(Momentum(0).Decode(0), 0.0f);
  EXPECT_EQ(Variance(0).Decode(0), 0.0f);
}

TEST(Companded8Test, ScalesAreRoundedUpToTheNextBf16) {
  Normals random(9);
  for (int i = 0; i < 200000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random.Word()) % ((127u + 119u) << 23);
    const double value = static_cast<double>(std::bit_cast<float>(bits));
    const uint32_t stored = Bf16RoundedUp(bits);
    ASSERT_GE(ScaleOf(stored), value);
    if (stored > 0) {
      ASSERT_LT(ScaleOf(stored - 1), value);
    }
  }
}

// Normalised mean square errors of one shot, over blocks of 32 of N(0,1), v = g^2.
struct Nmse {
  double m, v;
};
Nmse MeasureNmse(bool stochastic) {
  Normals random(17);
  double m_error = 0, m_sum = 0, v_error = 0, v_sum = 0;
  for (int block = 0; block < 20000; ++block) {
    const std::vector<float> g = random.Vector(kBlock);
    uint32_t most = 0;
    for (const float x : g) most = std::max(most, std::bit_cast<uint32_t>(std::abs(x)));
    const uint32_t stored = Bf16RoundedUp(most);
    const Momentum m(stored);
    const Variance v(stored);
    for (const float x : g) {
      const uint32_t bits = static_cast<uint32_t>(random.Word());
      const double exact = static_cast<double>(x), square = exact * exact;
      const double got = static_cast<double>(m.Decode(m.Encode(x, bits, stochastic)));
      const double got_square = static_cast<double>(v.Decode(v.Encode(std::abs(x), bits, stochastic)));
      m_error += (got - exact) * (got - exact), m_sum += square;
      v_error += (got_square - square) * (got_square - square), v_sum += square * square;
    }
  }
  return {m_error / m_sum, v_error / v_sum};
}

TEST(Companded8Test, ErrorOnNormalsIsWithinTheAcceptedFigures) {
  const Nmse stochastic = MeasureNmse(true), nearest = MeasureNmse(false);
  RecordProperty("stochastic_m", std::to_string(stochastic.m * 1e6) + "e-6");
  RecordProperty("stochastic_v", std::to_string(stochastic.v * 1e6) + "e-6");
  printf("NMSE: stochastic m %.3g v %.3g; nearest m %.3g v %.3g\n", stochastic.m, stochastic.v, nearest.m, nearest.v);
  EXPECT_LE(stochastic.m, 6e-5);
  EXPECT_LE(stochastic.v, 2.2e-5);
  EXPECT_LT(nearest.m, stochastic.m);
  EXPECT_LT(nearest.v, stochastic.v);
}

TEST(Companded8Test, NearestCodesAreThoseOfTheDefinition) {
  Normals random(23);
  int differing = 0;
  constexpr int kSamples = 200000;
  for (int i = 0; i < kSamples; ++i) {
    const uint32_t stored = (127u - 20 + static_cast<uint32_t>(random.Word() % 40)) << 7 | (random.Word() % 128);
    const double a = ScaleOf(stored), x = (2 * random.Uniform() - 1) * a;
    const float in = static_cast<float>(x), root = static_cast<float>(std::abs(x));
    const int m = static_cast<int8_t>(Momentum(stored).Encode(in, 0, false));
    const int v = static_cast<int>(Variance(stored).Encode(root, 0, false));
    const int wanted_m = oracle::MomentumNearest(static_cast<double>(in), a);
    const int wanted_v = oracle::VarianceNearest(static_cast<double>(root) * static_cast<double>(root), a);
    ASSERT_LE(std::abs(m - wanted_m), 1);
    ASSERT_LE(std::abs(v - wanted_v), 1);
    differing += (m != wanted_m ? 1 : 0) + (v != wanted_v ? 1 : 0);
  }
  // Positions err by 3 roundings of values below 256: a code differs where a half is nearer than about 2^-15.
  EXPECT_LE(differing, kSamples * 2 / 8192);
}

}  // namespace
}  // namespace ballast::kernels
