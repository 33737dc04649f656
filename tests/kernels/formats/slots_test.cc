// Every state format's codec by itself against the oracle, and what it refuses.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/kernels/decoded.h"
#include "tests/kernels/planes.h"
#include "tests/oracle/random.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kTensorKey = 5, kStep = 9;
double Wide(float x) { return static_cast<double>(x); }

// Blocks of every size between 2^-60 and 2^10, with zeros; v is never negative.
std::vector<float> Moments(Kind kind, uint64_t n) {
  Normals random(n);
  std::vector<float> values(n);
  double scale = 0;
  for (uint64_t i = 0; i < n; ++i) {
    if (i % kBlock == 0) scale = std::exp2(10 - 70 * random.Uniform());
    const double x = i % 11 == 0 ? 0 : scale * random.Next();
    values[i] = static_cast<float>(kind == Kind::kMomentum ? x : x * x);
  }
  return values;
}

// What the oracle says of one block's codes, nearest or with its random bits; fp32 may err by 2^-21 of a value.
void ExpectBlock(const Slot& slot, std::string_view state, Kind kind, const std::vector<float>& values, uint64_t first,
                 bool stochastic, const std::byte* codes, const std::byte* scales) {
  const oracle::SlotFormat format = oracle::FormatOf(state, MomentOf(kind));
  const auto encoded = [&](uint64_t i) { return format.of_root ? std::sqrt(Wide(values[i])) : Wide(values[i]); };
  const uint64_t size = static_cast<uint64_t>(format.block), last = std::min(first + size, slot.size());
  double most = 0;
  for (uint64_t i = first; i < last; ++i) most = std::max(most, std::abs(encoded(i)));
  const double stored = ScaleAt(state, scales, first / size);
  ASSERT_LE(format.scale(most * (1 - 0x1p-23)), stored);
  ASSERT_GE(format.scale(most * (1 + 0x1p-23)), stored);
  for (uint64_t i = first; i < last; ++i) {
    const oracle::RandomFields bits = oracle::RandomAt(kTensorKey, kStep, i);
    const oracle::Rounding rounding = {stochastic, kind == Kind::kMomentum ? bits.m : bits.v};
    const double slack = std::abs(encoded(i)) * 0x1p-21;
    const int code = CodeAt(state, kind, codes, i);
    ASSERT_LE(format.code(encoded(i) - slack, {most, stored}, rounding), code) << encoded(i) << " of " << stored;
    ASSERT_GE(format.code(encoded(i) + slack, {most, stored}, rounding), code) << encoded(i) << " of " << stored;
  }
}

void ExpectCodec(const char* state, Kind kind, bool stochastic) {
  Slot slot(state, kind, 3 * kTile + 77);
  const std::vector<float> values = Moments(kind, slot.size());
  ASSERT_TRUE(slot.Encode(values, RandomKey(kTensorKey, kStep), stochastic));
  const std::byte* planes[2] = {slot.planes()[0], slot.planes().count() > 1 ? slot.planes()[1] : nullptr};
  const DecodedSlot wanted = DecodePlanes(state, kind, planes, slot.size());
  const std::vector<float> decoded = slot.Decode();
  for (uint64_t i = 0; i < slot.size(); ++i) {
    ASSERT_NEAR(Wide(decoded[i]), wanted.values[i], std::abs(wanted.values[i]) * 0x1p-21 + 0x1p-148) << i;
  }
  const int block = oracle::FormatOf(state, MomentOf(kind)).block;
  for (uint64_t i = 0; block > 0 && i < slot.size(); i += static_cast<uint64_t>(block)) {
    ExpectBlock(slot, state, kind, values, i, stochastic, planes[0], planes[1]);
    if (testing::Test::HasFatalFailure()) return;
  }
  for (uint64_t i = 0; block == 0 && i < slot.size(); ++i) {
    const oracle::RandomFields bits = oracle::RandomAt(kTensorKey, kStep, i);
    const oracle::Rounding rounding = {stochastic, kind == Kind::kMomentum ? bits.m : bits.v};
    if (std::string_view(state) == "mcf" && kind == Kind::kVariance) continue;  // two components
    ASSERT_EQ(wanted.values[i], oracle::Kept(state, Wide(values[i]), rounding)) << i;
  }
}

TEST(SlotsTest, CodesAndScalesAreTheOracles) {
  for (const State& state : States()) {
    for (const Kind kind : {Kind::kMomentum, Kind::kVariance}) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(std::string(state.name) + (kind == Kind::kMomentum ? " m" : " v"));
        ExpectCodec(state.name, kind, stochastic);
      }
    }
  }
}

TEST(SlotsTest, AMomentOfTwoComponentsHoldsTwiceTheDigits) {
  Slot slot("mcf", Kind::kVariance, 1000);
  ASSERT_EQ(slot.codec().planes.size(), 2u);
  const std::vector<float> values = Moments(Kind::kVariance, 1000), decoded = slot.RoundTrip(values);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(Wide(decoded[i]), Wide(values[i]), Wide(values[i]) * 0x1p-16 + 0x1p-134);
  }
}

TEST(SlotsTest, BlocksOfZerosDecodeToZeros) {
  for (const State& state : States()) {
    for (const Kind kind : {Kind::kMomentum, Kind::kVariance}) {
      for (const bool stochastic : {false, true}) {
        Slot slot(state.name, kind, 300);
        std::vector<float> values(300);
        values[299] = 1;
        const std::vector<float> decoded = slot.RoundTrip(values, 7, stochastic);
        for (size_t i = 0; i < 256; ++i) ASSERT_EQ(decoded[i], 0.0f) << state.name;
        ASSERT_EQ(decoded[299], 1.0f) << state.name;
      }
    }
  }
}

TEST(SlotsTest, WhatIsNoMomentIsRefusedAndNothingIsStored) {
  for (const State& state : States()) {
    for (const Kind kind : {Kind::kMomentum, Kind::kVariance}) {
      SCOPED_TRACE(state.name);
      Slot slot(state.name, kind, 200);
      const std::vector<float> good(200, 0.5f);
      ASSERT_TRUE(slot.Encode(good));
      const std::vector<std::byte> before = slot.planes().Bytes();
      const float largest = slot.codec().largest, infinity = INFINITY;
      std::vector<float> bad = {NAN, -NAN, infinity, -infinity, std::nextafter(largest, infinity)};
      if (kind == Kind::kMomentum) bad.push_back(-bad.back());
      if (kind == Kind::kVariance) bad.push_back(-1e-30f);
      for (const float x : bad) {
        for (const size_t place : {0, 45, 199}) {
          std::vector<float> values(200, 0.25f);
          values[place] = x;
          EXPECT_FALSE(slot.Encode(values)) << x;
        }
      }
      EXPECT_TRUE(slot.planes().Bytes() == before);
      EXPECT_TRUE(slot.Encode(std::vector<float>(200, largest))) << largest;
      for (const float x : slot.Decode()) ASSERT_TRUE(std::isfinite(x)) << largest;
    }
  }
}

TEST(SlotsTest, TheLargestValueIsTheFormatsOwn) {
  EXPECT_EQ(FindState("fp32")->momentum.largest, 0x1p119f);
  EXPECT_EQ(FindState("companded8")->momentum.largest, 0x1p119f);
  EXPECT_LT(FindState("flash8")->momentum.largest, 65520.0f);
  EXPECT_GT(FindState("flash8")->momentum.largest, 65519.0f);
  EXPECT_NEAR(std::sqrt(Wide(FindState("flash8")->variance.largest)), 65520, 0.01);
}

// The expectation of what is decoded is the value: over 2^16 keys, which give random bits of their own.
TEST(Bf16StateTest, StochasticRoundingIsUnbiased) {
  for (const Kind kind : {Kind::kMomentum, Kind::kVariance}) {
    Slot slot("bf16", kind, 1 << 18);
    for (const float x : {1.0f + 0x1p-9f, 3.14159f, 1e-30f, 0x1.01fffp5f}) {
      const std::vector<float> decoded = slot.RoundTrip(std::vector<float>(slot.size(), x), 3, true);
      double sum = 0;
      for (const float d : decoded) sum += Wide(d);
      const double spacing = oracle::Spacing(Wide(x), oracle::kBf16);
      EXPECT_NEAR(sum / static_cast<double>(slot.size()), Wide(x), spacing * 5 * 0.5 / 512) << x;  // 5 deviations
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
