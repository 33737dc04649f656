// split24 and split32 against their definition.
#include "kernels/formats/split.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/kernels/tensor.h"
#include "tests/oracle/reference.h"

namespace ballast::kernels {
namespace {

using Lane = ScalarLane;

float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }

template <class Format>
Words<Lane> Nearest(float x) {
  return Format::template Encode<Lane>(x, 0, /*stochastic=*/false);
}
template <class Format>
float RoundTrip(float x) {
  return Format::template Decode<Lane>(Nearest<Format>(x));
}
double Served(const Words<Lane>& w) { return static_cast<double>(FromBits(w.word[0] << 16)); }

// A weight: hi finite, and lo not negative where hi is a zero.
bool IsWeight(uint32_t hi, uint32_t lo, uint32_t lo_sign) {
  const uint32_t magnitude = hi & 0x7fff;
  return magnitude < 0x7f80 && (magnitude != 0 || (lo & lo_sign) == 0);
}

TEST(Split24Test, EveryStoredWeightSurvivesDecodingAndEncoding) {
  uint64_t weights = 0;
  for (uint32_t hi = 0; hi < 65536; ++hi) {
    for (uint32_t lo = 0; lo < 256; ++lo) {
      if (!IsWeight(hi, lo, 0x80)) continue;
      const float x = Split24::Decode<Lane>(Words<Lane>{{hi, lo}});
      const Words<Lane> again = Nearest<Split24>(x);
      ASSERT_TRUE(again.word[0] == hi && again.word[1] == lo) << std::hex << hi << " " << lo;
      ++weights;
    }
  }
  EXPECT_EQ(weights, 2 * (0x7f80u * 256u - 128u));
}

TEST(Split24Test, StochasticRoundingOfAStoredWeightIsTheIdentityToo) {
  for (uint32_t u = 0; u < 1u << 24; u += 251) {
    const float x = FromBits(u << 8);
    if (!(std::abs(x) <= 0x1.fefep127f)) continue;
    for (const uint32_t random : {0u, 0x7fffffffu, 0xffffffffu}) {
      const Words<Lane> w = Split24::Encode<Lane>(x, random, true);
      ASSERT_EQ(BitsOf(Split24::Decode<Lane>(w)), u << 8) << random;
    }
  }
}

TEST(Split24Test, MatchesTheDefinitionInDoubleForEveryExponent) {
  Normals random(1);
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 600; ++i) {
      const uint32_t mantissa = i < 300 ? static_cast<uint32_t>(random.Word() & 0x7fffff)
                                        : static_cast<uint32_t>(i - 300) * 0x80u % 0x800000u;
      const float x = FromBits((exponent << 23 | mantissa) | (i % 2 != 0 ? 0x80000000u : 0));
      const oracle::SplitValue wanted = oracle::Split(static_cast<double>(x), 8);
      const Words<Lane> got = Nearest<Split24>(x);
      ASSERT_EQ(static_cast<double>(Split24::Decode<Lane>(got)), wanted.kept) << std::hex << BitsOf(x);
      ASSERT_EQ(Served(got), wanted.served) << std::hex << BitsOf(x);
      ASSERT_TRUE(IsWeight(got.word[0], got.word[1], 0x80));
    }
  }
}

// Each of the 256 dropped patterns is rounded up by as many of the 256 values of r.
TEST(Split24Test, StochasticRoundingIsUnbiased) {
  for (const uint32_t base : {0x3f800000u, 0xbf7fff00u, 0x00000100u, 0x7f000000u, 0x3f807f00u}) {
    for (uint32_t dropped = 0; dropped < 256; ++dropped) {
      uint32_t up = 0;
      for (uint32_t r = 0; r < 256; ++r) {
        const Words<Lane> w = Split24::Encode<Lane>(FromBits(base | dropped), r << 24, true);
        const uint32_t stored = BitsOf(Split24::Decode<Lane>(w));
        ASSERT_TRUE(stored == base || stored == base + 0x100) << std::hex << stored;
        up += stored == base ? 0 : 1;
      }
      ASSERT_EQ(up, dropped);
    }
  }
}

TEST(Split24Test, SaturatesToTheLargestFiniteWeight) {
  for (const float x : {FromBits(0x7f7fffff), FromBits(0x7f7f8000), FromBits(0x7f7f7f80)}) {
    for (const bool stochastic : {false, true}) {
      const Words<Lane> w = Split24::Encode<Lane>(x, 0xffffffff, stochastic);
      EXPECT_EQ(w.word[0], 0x7f7fu);
      EXPECT_EQ(w.word[1], 0x7fu);
      const Words<Lane> negative = Split24::Encode<Lane>(-x, 0xffffffff, stochastic);
      EXPECT_EQ(negative.word[0], 0xff7fu);
      EXPECT_EQ(negative.word[1], 0x7fu);
    }
  }
}

TEST(Split24Test, TheWorkedExampleHolds) {
  const Words<Lane> w = Nearest<Split24>(1.0f + 0x1p-9f);
  EXPECT_EQ(w.word[0], 0x3f80u);
  EXPECT_EQ(w.word[1], 0x40u);
}

TEST(Split32Test, IsLosslessForEveryExponentBelowSaturation) {
  Normals random(2);
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 4000; ++i) {
      const uint32_t mantissa = i < 2000 ? static_cast<uint32_t>(random.Word() & 0x7fffff)
                                         : static_cast<uint32_t>(i - 2000) * 0x1000u % 0x800000u + (i % 3u);
      const uint32_t magnitude = exponent << 23 | (mantissa & 0x7fffff);
      if (magnitude > 0x7f7f7fff) continue;
      const uint32_t bits = magnitude | (i % 2 != 0 ? 0x80000000u : 0);
      const Words<Lane> w = Nearest<Split32>(FromBits(bits));
      ASSERT_EQ(BitsOf(Split32::Decode<Lane>(w)), bits);
      ASSERT_EQ(Served(w), oracle::Split(static_cast<double>(FromBits(bits)), 16).served) << std::hex << bits;
      ASSERT_TRUE(IsWeight(w.word[0], w.word[1], 0x8000));
    }
  }
}

TEST(Split32Test, SaturatesToTheLargestFiniteWeight) {
  EXPECT_EQ(BitsOf(RoundTrip<Split32>(FromBits(0x7f7f7fff))), 0x7f7f7fffu);
  for (const uint32_t bits : {0x7f7f8000u, 0x7f7fffffu}) {
    EXPECT_EQ(BitsOf(RoundTrip<Split32>(FromBits(bits))), 0x7f7f7fffu);
    EXPECT_EQ(BitsOf(RoundTrip<Split32>(FromBits(bits | 0x80000000))), 0xff7f7fffu);
  }
}

TEST(SplitTest, SignedZerosAndSubnormalsKeepTheirSign) {
  EXPECT_EQ(BitsOf(RoundTrip<Split24>(-0.0f)), 0x80000000u);
  EXPECT_EQ(BitsOf(RoundTrip<Split32>(-0.0f)), 0x80000000u);
  for (const uint32_t bits : {1u, 0x7fu, 0x80u, 0x100u, 0x7fffu, 0x8000u, 0x7fffffu, 0x800000u}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      EXPECT_EQ(BitsOf(RoundTrip<Split32>(FromBits(bits | sign))), bits | sign);
      EXPECT_EQ(BitsOf(RoundTrip<Split24>(FromBits(bits | sign))), ((bits + 0x80) & ~0xffu) | sign);
    }
  }
}

TEST(SplitTest, LoadingRefusesWhatIsNotFiniteAndStoresNothing) {
  for (const Kernel& kernel : Kernels()) {
    SCOPED_TRACE(NameOf(kernel));
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      Tensor tensor(kernel, 100);
      const std::vector<std::byte> before = tensor.Bytes();
      std::vector<float> weights(100, 1.5f);
      weights[99] = bad;
      std::byte* planes[] = {tensor.plane(0), tensor.plane(1)};
      EXPECT_FALSE(FindMaster(kernel.master)->load(planes, 0, weights.data(), 0, 100));
      EXPECT_EQ(tensor.Bytes(), before);
    }
  }
}

TEST(SplitTest, TheServedBf16IsTheStoredHighWord) {
  for (const char* name : {"split24", "split32"}) {
    Tensor tensor(*FindKernel("adamw", name, "fp32"), 100);
    tensor.SetWeights(Normals(3).Vector(100));
    std::vector<uint16_t> served(100);
    const std::byte* planes[] = {tensor.plane(0), tensor.plane(1)};
    FindMaster(name)->serve(planes, FindWireFormat("bf16"), served.data(), 0, 100);
    EXPECT_EQ(std::memcmp(served.data(), tensor.plane(0), 200), 0) << name;
  }
}

}  // namespace
}  // namespace ballast::kernels
