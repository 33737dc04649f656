// Weights that are served narrower than the trainer computes, decoded.
#include "client/cpp/wire/wire_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::byte> Codes(std::initializer_list<int> codes) {
  std::vector<std::byte> bytes;
  for (const int code : codes) bytes.push_back(static_cast<std::byte>(code));
  return bytes;
}

std::vector<float> Decoded(const EncodedWeights& weights) {
  std::vector<float> out(weights.codes.size());
  EXPECT_TRUE(DecodeWeights(weights, "fp32", reinterpret_cast<std::byte*>(out.data())).ok());
  return out;
}

// The word that one float becomes in a format of 16 bits, by way of a scale that makes the code 127 stand for it.
uint16_t Rounded(float value, const char* dtype) {
  const auto codes = Codes({127});
  const float scale = value;
  uint16_t word = 0;
  const EncodedWeights weights{.format = "int8-tensor", .row_length = 1, .codes = codes, .scales = {&scale, 1}};
  EXPECT_TRUE(DecodeWeights(weights, dtype, reinterpret_cast<std::byte*>(&word)).ok());
  return word;
}

TEST(WireFormatTest, Int8IsCodeTimesScaleBy127) {
  const auto codes = Codes({127, -127, 0, 1, 64});
  const float scale = 2;
  EXPECT_THAT(Decoded({.format = "int8-tensor", .row_length = 5, .codes = codes, .scales = {&scale, 1}}),
              ElementsAre(2.f, -2.f, 0.f, 2.f / 127, 128.f / 127));
}

TEST(WireFormatTest, APieceThatBeginsInsideARowFindsItsScales) {
  const auto codes = Codes({127, 127, 127, 127, 127});
  const float scales[] = {1, 2, 3};  // of rows 1, 2 and 3, of two elements each
  EXPECT_THAT(Decoded({.format = "int8-row", .first = 3, .row_length = 2, .codes = codes, .scales = scales}),
              ElementsAre(1, 2, 2, 3, 3));
  EXPECT_EQ(ScalesNeeded(2, 3, 8), 3u);
  EXPECT_EQ(ScalesNeeded(2, 2, 4), 1u);
  EXPECT_EQ(ScalesNeeded(0, 2, 4), 0u);
}

TEST(WireFormatTest, Fp8IsOcpE4M3) {
  const auto codes = Codes({0x00, 0x80, 0x38, 0xb8, 0x7e, 0x01, 0x07, 0x08, 0x7f});
  const std::vector<float> got = Decoded({.format = "fp8-e4m3", .codes = codes});
  EXPECT_TRUE(std::signbit(got[1]));
  EXPECT_TRUE(std::isnan(got[8]));
  EXPECT_THAT(std::vector(got.begin(), got.end() - 1), ElementsAre(0, 0, 1, -1, 448, 0x1p-9f, 0x7p-9f, 0x1p-6f));
}

TEST(WireFormatTest, RoundsToNearestEvenAndStaysFinite) {
  EXPECT_EQ(Rounded(0x1.01p0f, "bf16"), 0x3f80);  // halfway, to even
  EXPECT_EQ(Rounded(0x1.03p0f, "bf16"), 0x3f82);
  EXPECT_EQ(Rounded(0x1.002p0f, "fp16"), 0x3c00);
  EXPECT_EQ(Rounded(0x1.006p0f, "fp16"), 0x3c02);
  EXPECT_EQ(Rounded(1e6f, "fp16"), 0x7bff);
  EXPECT_EQ(Rounded(0x1p-24f, "fp16"), 0x0001);
  EXPECT_EQ(Rounded(0x1.8p-24f, "fp16"), 0x0002);
  EXPECT_EQ(Rounded(0x1.ffcp-15f, "fp16"), 0x0400);  // up to the least normal
}

TEST(WireFormatTest, FloatsBecomeWiderAndNarrower) {
  for (const float value : {0.0f, -0.0f, 1.5f, -3.0f, 0x1p-24f, -0x1.8p-20f, 0x1p-14f, 65504.0f}) {
    uint32_t half = Rounded(value, "fp16");
    float back = -1;
    ASSERT_TRUE(DecodeWeights({.format = "fp16", .codes = {reinterpret_cast<std::byte*>(&half), 2}}, "fp32",
                              reinterpret_cast<std::byte*>(&back))
                    .ok());
    EXPECT_EQ(std::bit_cast<uint32_t>(back), std::bit_cast<uint32_t>(value)) << value;
  }
  const auto codes = Codes({0x80, 0x3f, 0x80, 0xff, 0xc0, 0x7f});
  const std::vector<float> got = Decoded({.format = "bf16", .codes = codes});
  EXPECT_EQ(got[0], 1);
  EXPECT_TRUE(std::isinf(got[1]) && got[1] < 0);
  EXPECT_TRUE(std::isnan(got[2]));
}

TEST(WireFormatTest, RefusesWhatItCannotDecode) {
  const auto codes = Codes({1, 2});
  std::byte out[8];
  EXPECT_EQ(DecodeWeights({.format = "int4", .codes = codes}, "fp32", out).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(DecodeWeights({.format = "fp8-e4m3", .codes = codes}, "fp8-e4m3", out).code(),
            absl::StatusCode::kUnimplemented);
  const absl::Status scales = DecodeWeights({.format = "int8-row", .row_length = 1, .codes = codes}, "fp32", out);
  EXPECT_THAT(std::string(scales.message()), HasSubstr("0 scales instead of 2"));
}

}  // namespace
}  // namespace ballast
