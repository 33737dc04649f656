// Every state format's codec by itself against the oracle, and what it refuses.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/kernels/decoded.h"
#include "tests/kernels/moment_values.h"
#include "tests/kernels/planes.h"
#include "tests/oracle/random.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kTensorKey = 5, kStep = 9;
double Wide(float x) { return static_cast<double>(x); }

// What the oracle says of one block's codes, nearest or with its random bits; fp32 may err by 2^-21 of a value.
void ExpectBlock(const Moment& moment, std::string_view state, PlaneKind kind, const std::vector<float>& values,
                 uint64_t first, bool stochastic, const std::byte* codes, const std::byte* scales) {
  const oracle::FormatOfMoment format = oracle::FormatOf(state, MomentOf(kind));
  const auto encoded = [&](uint64_t i) { return format.of_root ? std::sqrt(Wide(values[i])) : Wide(values[i]); };
  const uint64_t size = static_cast<uint64_t>(format.block), last = std::min(first + size, moment.size());
  double most = 0;
  for (uint64_t i = first; i < last; ++i) most = std::max(most, std::abs(encoded(i)));
  const double stored = ScaleAt(state, scales, first / size);
  ASSERT_LE(format.scale(most * (1 - 0x1p-23)), stored);
  ASSERT_GE(format.scale(most * (1 + 0x1p-23)), stored);
  for (uint64_t i = first; i < last; ++i) {
    const oracle::RandomFields bits = oracle::RandomAt(kTensorKey, kStep, i);
    const oracle::Rounding rounding = {stochastic, kind == PlaneKind::kMomentum ? bits.m : bits.v};
    const double slack = std::abs(encoded(i)) * 0x1p-21;
    const int code = CodeAt(state, kind, codes, i);
    ASSERT_LE(format.code(encoded(i) - slack, {most, stored}, rounding), code) << encoded(i) << " of " << stored;
    ASSERT_GE(format.code(encoded(i) + slack, {most, stored}, rounding), code) << encoded(i) << " of " << stored;
  }
}

void ExpectCodec(const char* state, PlaneKind kind, bool stochastic) {
  Moment moment(state, kind, 3 * kTile + 77);
  const std::vector<float> values = MomentsOfEverySize(kind, moment.size());
  ASSERT_TRUE(moment.Encode(values, RandomKey(kTensorKey, kStep), stochastic));
  const std::byte* planes[2] = {moment.planes()[0], moment.planes().count() > 1 ? moment.planes()[1] : nullptr};
  const DecodedMoment wanted = DecodePlanes(state, kind, planes, moment.size());
  const std::vector<float> decoded = moment.Decode();
  for (uint64_t i = 0; i < moment.size(); ++i) {
    ASSERT_NEAR(Wide(decoded[i]), wanted.values[i], std::abs(wanted.values[i]) * 0x1p-21 + 0x1p-148) << i;
  }
  const int block = oracle::FormatOf(state, MomentOf(kind)).block;
  for (uint64_t i = 0; block > 0 && i < moment.size(); i += static_cast<uint64_t>(block)) {
    ExpectBlock(moment, state, kind, values, i, stochastic, planes[0], planes[1]);
    if (testing::Test::HasFatalFailure()) return;
  }
  for (uint64_t i = 0; block == 0 && i < moment.size(); ++i) {
    const oracle::RandomFields bits = oracle::RandomAt(kTensorKey, kStep, i);
    const oracle::Rounding rounding = {stochastic, kind == PlaneKind::kMomentum ? bits.m : bits.v};
    if (std::string_view(state) == "mcf" && kind == PlaneKind::kVariance) continue;  // two components
    ASSERT_EQ(wanted.values[i], oracle::Kept(state, Wide(values[i]), rounding)) << i;
  }
}

TEST(MomentsTest, CodesAndScalesAreTheOracles) {
  for (const MomentFormat& state : MomentFormats()) {
    for (const PlaneKind kind : {PlaneKind::kMomentum, PlaneKind::kVariance}) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(std::string(state.name) + (kind == PlaneKind::kMomentum ? " m" : " v"));
        ExpectCodec(state.name, kind, stochastic);
      }
    }
  }
}

TEST(MomentsTest, AMomentOfTwoComponentsHoldsTwiceTheDigits) {
  Moment moment("mcf", PlaneKind::kVariance, 1000);
  ASSERT_EQ(moment.codec().planes.size(), 2u);
  const std::vector<float> values = MomentsOfEverySize(PlaneKind::kVariance, 1000), decoded = moment.RoundTrip(values);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(Wide(decoded[i]), Wide(values[i]), Wide(values[i]) * 0x1p-16 + 0x1p-134);
  }
}

TEST(MomentsTest, BlocksOfZerosDecodeToZeros) {
  for (const MomentFormat& state : MomentFormats()) {
    for (const PlaneKind kind : {PlaneKind::kMomentum, PlaneKind::kVariance}) {
      for (const bool stochastic : {false, true}) {
        Moment moment(state.name, kind, 300);
        std::vector<float> values(300);
        values[299] = 1;
        const std::vector<float> decoded = moment.RoundTrip(values, 7, stochastic);
        for (size_t i = 0; i < 256; ++i) ASSERT_EQ(decoded[i], 0.0f) << state.name;
        ASSERT_EQ(decoded[299], 1.0f) << state.name;
      }
    }
  }
}

TEST(MomentsTest, WhatIsNoMomentIsRefusedAndNothingIsStored) {
  for (const MomentFormat& state : MomentFormats()) {
    for (const PlaneKind kind : {PlaneKind::kMomentum, PlaneKind::kVariance}) {
      SCOPED_TRACE(state.name);
      Moment moment(state.name, kind, 200);
      const std::vector<float> good(200, 0.5f);
      ASSERT_TRUE(moment.Encode(good));
      const std::vector<std::byte> before = moment.planes().Bytes();
      const float largest = moment.codec().largest, infinity = INFINITY;
      std::vector<float> bad = {NAN, -NAN, infinity, -infinity, std::nextafter(largest, infinity)};
      if (kind == PlaneKind::kMomentum) bad.push_back(-bad.back());
      if (kind == PlaneKind::kVariance) bad.push_back(-1e-30f);
      for (const float x : bad) {
        for (const size_t place : {0, 45, 199}) {
          std::vector<float> values(200, 0.25f);
          values[place] = x;
          EXPECT_FALSE(moment.Encode(values)) << x;
        }
      }
      EXPECT_TRUE(moment.planes().Bytes() == before);
      EXPECT_TRUE(moment.Encode(std::vector<float>(200, largest))) << largest;
      for (const float x : moment.Decode()) ASSERT_TRUE(std::isfinite(x)) << largest;
    }
  }
}

TEST(MomentsTest, TheLargestValueIsTheFormatsOwn) {
  EXPECT_EQ(FindMomentFormat("fp32")->momentum.largest, 0x1p119f);
  EXPECT_EQ(FindMomentFormat("companded8")->momentum.largest, 0x1p119f);
  EXPECT_LT(FindMomentFormat("flash8")->momentum.largest, 65520.0f);
  EXPECT_GT(FindMomentFormat("flash8")->momentum.largest, 65519.0f);
  EXPECT_NEAR(std::sqrt(Wide(FindMomentFormat("flash8")->variance.largest)), 65520, 0.01);
}

// The expectation of what is decoded is the value: over 2^16 keys, which give random bits of their own.
TEST(Bf16StateTest, StochasticRoundingIsUnbiased) {
  for (const PlaneKind kind : {PlaneKind::kMomentum, PlaneKind::kVariance}) {
    Moment moment("bf16", kind, 1 << 18);
    for (const float x : {1.0f + 0x1p-9f, 3.14159f, 1e-30f, 0x1.01fffp5f}) {
      const std::vector<float> decoded = moment.RoundTrip(std::vector<float>(moment.size(), x), 3, true);
      double sum = 0;
      for (const float d : decoded) sum += Wide(d);
      const double spacing = oracle::Spacing(Wide(x), oracle::kBf16);
      EXPECT_NEAR(sum / static_cast<double>(moment.size()), Wide(x), spacing * 5 * 0.5 / 512) << x;  // 5 deviations
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
