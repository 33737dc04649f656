#include "server/store/exact_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <string>

#include "tests/kernels/planes.h"
#include "tests/kernels/tensor.h"

namespace ballast {
namespace {

using kernels::Moment;
using kernels::PlaneKind;

constexpr uint64_t kMoments = 3 * kernels::kTile + 77;

std::vector<float> ValuesOf(bool variance, uint64_t seed) {
  kernels::Normals random(seed);
  std::vector<float> values(kMoments);
  double scale = 0;
  for (uint64_t i = 0; i < kMoments; ++i) {
    if (i % kernels::kBlock == 0) scale = std::exp2(10 - 70 * random.Uniform());
    const double x = i % 11 == 0 || i % 640 < 32 ? 0 : scale * random.Next();
    values[i] = static_cast<float>(variance ? x * x : x);
  }
  return values;
}

bool BitsAreEqual(const std::vector<float>& one, const std::vector<float>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); });
}

// A moment is used by what it decodes to alone, so a run whose moments decode to the same goes on to the bit. dynamic8
// has no code for the largest negative value: its scale is not found again.
TEST(ExactCodesTest, WhatIsLoadedAsItWasDecodedDecodesToTheSameBits) {
  for (const kernels::MomentFormat& state : kernels::MomentFormats()) {
    for (const bool variance : {false, true}) {
      for (const bool stochastic : {false, true}) {
        for (uint64_t seed = 1; seed <= 20; ++seed) {
          SCOPED_TRACE(std::string(state.name) + (variance ? " v" : " m") + (stochastic ? ", stochastic" : ""));
          Moment moment(state.name, variance ? PlaneKind::kVariance : PlaneKind::kMomentum, kMoments);
          ASSERT_TRUE(moment.Encode(ValuesOf(variance, seed), seed, stochastic));
          const std::vector<float> given = moment.Decode();
          ASSERT_TRUE(moment.Encode(given));
          RecoverCodes(moment.codec(), moment.planes().get(), given.data(), kMoments);
          if (std::string(state.name) == "dynamic8" && !variance) continue;
          ASSERT_TRUE(BitsAreEqual(moment.Decode(), given)) << "seed " << seed;
        }
      }
    }
  }
}

TEST(ExactCodesTest, OtherValuesStayAsTheyAreRounded) {
  for (const kernels::MomentFormat& state : kernels::MomentFormats()) {
    for (const bool variance : {false, true}) {
      SCOPED_TRACE(std::string(state.name) + (variance ? " v" : " m"));
      Moment moment(state.name, variance ? PlaneKind::kVariance : PlaneKind::kMomentum, kMoments);
      const std::vector<float> values = ValuesOf(variance, 5);
      ASSERT_TRUE(moment.Encode(values));
      const auto rounded = moment.planes().Bytes();
      RecoverCodes(moment.codec(), moment.planes().get(), values.data(), kMoments);
      EXPECT_EQ(moment.planes().Bytes(), rounded);
    }
  }
}

}  // namespace
}  // namespace ballast
