// The master formats against their definitions, through loading and serving.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <thread>

#include "tests/kernels/decoded.h"
#include "tests/kernels/planes.h"

namespace ballast::kernels {
namespace {

float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }
double Wide(float x) { return static_cast<double>(x); }

// Random and regular mantissas of every exponent, of both signs.
std::vector<float> EveryExponent(int per_exponent) {
  Normals random(1);
  std::vector<float> values;
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < per_exponent; ++i) {
      const uint32_t mantissa =
          i % 2 == 0 ? static_cast<uint32_t>(random.Word()) : static_cast<uint32_t>(i) * 0x40u + (i % 3 == 0 ? 1u : 0u);
      const uint32_t sign = random.Word() % 2 == 0 ? 0 : 0x80000000u;
      values.push_back(FromBits(sign | exponent << 23 | (mantissa & 0x7fffff)));
    }
  }
  return values;
}

// A weight: hi finite, and lo not negative where hi is a zero.
bool IsWeight(uint32_t hi, int lo) {
  const uint32_t magnitude = hi & 0x7fff;
  return magnitude < 0x7f80 && (magnitude != 0 || lo >= 0);
}

TEST(Split24Test, EveryStoredWeightSurvivesServingAndLoading) {
  constexpr uint32_t kHis = 4096;
  uint64_t weights = 0;
  for (uint32_t from = 0; from < 65536; from += kHis) {
    Weights w("split24", uint64_t{kHis} * 256);
    for (uint32_t i = 0; i < kHis * 256; ++i) {
      const uint16_t hi = static_cast<uint16_t>(from + i / 256);
      const int8_t lo = static_cast<int8_t>(i % 256 - 128);
      if (!IsWeight(hi, lo)) continue;
      std::memcpy(w.planes()[0] + i * 2, &hi, 2);
      std::memcpy(w.planes()[1] + i, &lo, 1);
      ++weights;
    }
    const std::vector<std::byte> before = w.planes().Bytes();
    const std::vector<float> values = w.Values();
    Weights again("split24", values.size());
    ASSERT_TRUE(again.Load(values));
    ASSERT_TRUE(again.planes().Bytes() == before) << from;
  }
  EXPECT_EQ(weights, 2 * (0x7f80u * 256u - 128u));
}

// What is kept and what is served of every exponent, for the formats that round to nearest when loading.
TEST(MastersTest, LoadingKeepsAndServesWhatTheDefinitionSays) {
  const std::vector<float> values = EveryExponent(2048);
  for (const MasterFormat& master : MasterFormats()) {
    SCOPED_TRACE(master.name);
    Weights w(master.name, values);
    const std::vector<float> served = w.Values();
    const std::vector<uint16_t> bf16 = w.Served<uint16_t>("bf16");
    // flash's q/N is rounded, and so is the sum; mcf's sum is.
    const std::string_view name = master.name;
    const double error = name.starts_with("flash") || name == "mcf" ? 0x1p-23 : 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double x = Wide(values[i]), kept = WeightAt(master.name, w.planes().get(), i);
      const oracle::StoredWeight wanted = oracle::Store(master.name, x, {});
      ASSERT_EQ(kept, wanted.value) << std::hex << BitsOf(values[i]);
      ASSERT_NEAR(Wide(served[i]), kept, error * (std::abs(kept) + 0x1p-126)) << std::hex << BitsOf(values[i]);
      const double narrow = oracle::ValueOf(bf16[i], oracle::kBf16, 16);
      ASSERT_TRUE(narrow == wanted.served || narrow == oracle::Nearest(Wide(served[i]), oracle::kBf16))
          << std::hex << BitsOf(values[i]);
    }
  }
}

TEST(SplitTest, TheServedBf16IsTheStoredHighWord) {
  const std::vector<float> values = EveryExponent(512);
  for (const char* name : {"split24", "split32"}) {
    Weights w(name, values);
    const std::vector<uint16_t> served = w.Served<uint16_t>("bf16");
    EXPECT_EQ(std::memcmp(served.data(), w.planes()[0], served.size() * 2), 0) << name;
  }
}

TEST(SplitTest, EveryStoredWordIsAWeight) {
  const std::vector<float> values = EveryExponent(512);
  for (const char* name : {"split24", "split32"}) {
    Weights w(name, values);
    for (size_t i = 0; i < values.size(); ++i) {
      const int lo = name[5] == '2' ? int{ReadAt<int8_t>(w.planes()[1], i)} : int{ReadAt<int16_t>(w.planes()[1], i)};
      ASSERT_TRUE(IsWeight(ReadAt<uint16_t>(w.planes()[0], i), lo)) << name << std::hex << BitsOf(values[i]);
    }
  }
}

TEST(SplitTest, SaturatesToTheLargestFiniteWeight) {
  const std::vector<float> values = {FromBits(0x7f7fffff), FromBits(0x7f7f8000), FromBits(0xff7fffff)};
  const std::vector<float> narrow = Weights("split24", values).Values(), wide = Weights("split32", values).Values();
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(BitsOf(narrow[i]), 0x7f7f7f00u | (BitsOf(values[i]) & 0x80000000u));
    EXPECT_EQ(BitsOf(wide[i]), 0x7f7f7fffu | (BitsOf(values[i]) & 0x80000000u));
  }
}

TEST(SplitTest, SignedZerosAndSubnormalsKeepTheirSign) {
  std::vector<float> values = {0.0f, -0.0f};
  for (const uint32_t bits : {1u, 0x7fu, 0x80u, 0x100u, 0x7fffu, 0x8000u, 0x7fffffu, 0x800000u}) {
    for (const uint32_t sign : {0u, 0x80000000u}) values.push_back(FromBits(bits | sign));
  }
  const std::vector<float> narrow = Weights("split24", values).Values(), wide = Weights("split32", values).Values();
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = BitsOf(values[i]);
    EXPECT_EQ(BitsOf(wide[i]), bits);
    EXPECT_EQ(BitsOf(narrow[i]), (((bits & 0x7fffffff) + 0x80) & ~0xffu) | (bits & 0x80000000u));
  }
}

// Every 2^32 patterns in chunks, some of them only where a sanitizer makes each slow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kChunkStride = 257;
#else
constexpr uint64_t kChunkStride = 1;
#endif

// Returns how many patterns of [first, first + n) were kept; n counted where all were right.
uint64_t LosslessPatterns(uint32_t first, uint32_t n, Weights* w, std::vector<float>* values) {
  for (uint32_t i = 0; i < n; ++i) (*values)[i] = FromBits(first + i);
  if (!w->Load(*values)) return 0;
  const std::vector<float> served = w->Values();
  if (std::memcmp(served.data(), values->data(), n * sizeof(float)) != 0) return 0;
  uint32_t wrong = 0;
  for (uint32_t i = 0; i < n; ++i) {  // hi is the pattern's upper half, rounded half up; lo what is left
    const uint32_t bits = first + i, hi = (bits + 0x8000) >> 16;
    wrong |= hi ^ ReadAt<uint16_t>(w->planes()[0], i);
    wrong |= (bits - (hi << 16)) ^ static_cast<uint32_t>(int{ReadAt<int16_t>(w->planes()[1], i)});
  }
  return wrong == 0 ? n : 0;
}

TEST(Split32Test, IsLosslessForEveryPatternBelowSaturation) {
  constexpr uint32_t kChunk = 1u << 15, kFinite = 0x7f7f8000;  // per sign
  uint64_t kept[2] = {};
  const auto walk = [&](uint32_t sign) {
    Weights w("split32", kChunk);
    std::vector<float> values(kChunk);
    for (uint64_t first = 0; first < kFinite; first += kChunk * kChunkStride) {
      kept[sign] += LosslessPatterns(sign << 31 | static_cast<uint32_t>(first), kChunk, &w, &values);
    }
  };
  std::thread other([&] { walk(1); });
  walk(0);
  other.join();
  const uint64_t chunks = (kFinite / kChunk + kChunkStride - 1) / kChunkStride;
  EXPECT_EQ(kept[0], chunks * kChunk);
  EXPECT_EQ(kept[1], chunks * kChunk);
}

TEST(Bf16MasterTest, EveryFiniteCodeSurvives) {
  std::vector<float> values;
  for (uint32_t code = 0; code < 65536; ++code) {
    if ((code & 0x7fff) < 0x7f80) values.push_back(FromBits(code << 16));
  }
  for (const char* name : {"bf16", "mcf", "split24", "split32"}) {
    const std::vector<float> kept = Weights(name, values).Values();
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(kept[i], values[i]) << name;
      if (std::string_view(name) != "mcf") {
        ASSERT_EQ(std::signbit(kept[i]), std::signbit(values[i])) << name;
      }
    }
  }
}

// |lo| is at most half the spacing of hi, and the two hold 16 digits at least.
TEST(McfMasterTest, HoldsTwiceTheDigits) {
  const std::vector<float> values = EveryExponent(256);
  Weights w("mcf", values);
  for (size_t i = 0; i < values.size(); ++i) {
    const double hi = oracle::ValueOf(ReadAt<uint16_t>(w.planes()[0], i), oracle::kBf16, 16);
    const double lo = oracle::ValueOf(ReadAt<uint16_t>(w.planes()[1], i), oracle::kBf16, 16);
    if (std::abs(hi) == oracle::kBf16.largest) continue;
    ASSERT_LE(std::abs(lo), oracle::Spacing(hi, oracle::kBf16) / 2);
    ASSERT_LE(std::abs(hi + lo - Wide(values[i])), std::max(std::abs(hi) * 0x1p-16, 0x1p-134));
  }
}

// Two bytes as bf16's, and no farther off where e4m3 is normal; below that to 2^-14, half the spacing of lo there.
TEST(Mcf8Test, IsAsNearAsBf16WhereWeightsAre) {
  const std::vector<float> values = EveryExponent(2048);
  const std::vector<float> kept = Weights("mcf8", values).Values();
  uint64_t normal = 0, small = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double x = Wide(values[i]), off = std::abs(Wide(kept[i]) - x);
    if (std::abs(x) < 0x1p-6) {
      ASSERT_LE(off, 0x1p-14) << std::hex << BitsOf(values[i]);
      ++small;
    } else if (std::abs(x) <= 464) {
      ASSERT_LE(off, oracle::Spacing(x, oracle::kBf16) / 2) << std::hex << BitsOf(values[i]);
      ++normal;
    }
  }
  EXPECT_GT(normal, 14u * 2048);
  EXPECT_GT(small, 100u * 2048);
}

TEST(Mcf8Test, SaturatesAtBothComponentsLargest) {
  const std::vector<float> values = {57792.0f, 60000.0f, -1e30f};
  EXPECT_EQ(Weights("mcf8", values).Values(), (std::vector<float>{57792.0f, 57792.0f, -57792.0f}));
  EXPECT_NEAR(Weights("mcf8", std::vector<float>{1000.0f}).Values()[0], 1000.0f, 64)
      << "beyond e4m3 e5m2 has three digits";
}

TEST(MastersTest, LoadingRefusesWhatIsNotFiniteAndStoresNothing) {
  for (const MasterFormat& master : MasterFormats()) {
    for (const WireIndex format : GradientFormats()) {
      SCOPED_TRACE(std::string(master.name) + " " + NameOf(format));
      for (const float bad : {INFINITY, -INFINITY, NAN}) {
        for (const size_t place : {0, 31, 77, 99}) {
          std::vector<float> values(100, 1.5f);
          Weights w(master.name, 100);
          ASSERT_TRUE(w.Load(format, Encoded(format, values).bytes.data()));
          const std::vector<std::byte> before = w.planes().Bytes();
          std::fill(values.begin(), values.end(), 2.5f);
          values[place] = bad;
          EXPECT_FALSE(w.Load(format, Encoded(format, values).bytes.data()));
          EXPECT_TRUE(w.planes().Bytes() == before);
        }
      }
    }
  }
}

TEST(MastersTest, PartsAreLoadedAndServedAsTheWhole) {
  constexpr uint64_t kN = 1000;
  const std::vector<float> values = Normals(3).Vector(kN);
  for (const MasterFormat& master : MasterFormats()) {
    SCOPED_TRACE(master.name);
    Weights whole(master.name, values), parts(master.name, kN);
    const std::vector<float> served = whole.Values();
    std::vector<float> got(kN);
    const WireIndex fp32 = FindWireFormat("fp32");
    for (const auto& [first, last] : {std::pair<uint64_t, uint64_t>{608, kN}, {0, 32}, {32, 608}}) {
      ASSERT_TRUE(master.load(parts.planes().get(), fp32, values.data() + first, first, last));
      master.encode_weights(parts.planes().get(), fp32, nullptr, 1, got.data() + first, first, last);
    }
    EXPECT_TRUE(parts.planes().Bytes() == whole.planes().Bytes());
    EXPECT_EQ(got, served);
  }
}

TEST(MastersTest, AbsmaxIsOverTheDecodedWeightsOfAnyRange) {
  const std::vector<float> values = Normals(4).Vector(700);
  for (const MasterFormat& master : MasterFormats()) {
    Weights w(master.name, values);
    const std::vector<float> served = w.Values();
    for (const auto& [first, last] :
         {std::pair<uint64_t, uint64_t>{0, 700}, {0, 1}, {7, 7}, {13, 14}, {31, 33}, {5, 699}}) {
      float most = 0;
      for (uint64_t i = first; i < last; ++i) most = std::max(most, std::abs(served[i]));
      EXPECT_EQ(master.absmax(w.planes().get(), first, last), most) << master.name << " " << first;
    }
    EXPECT_EQ(master.absmax(Weights(master.name, std::vector<float>(64, -0.0f)).planes().get(), 0, 64), 0.0f);
  }
}

}  // namespace
}  // namespace ballast::kernels
