// Changes of weights, there and back: every coding, every width, against the new codes themselves; and malformed ones.
#include "proto/changes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kNoLimit = ~uint64_t{0};

absl::Span<const std::byte> BytesOf(const std::string& codes) {
  return {reinterpret_cast<const std::byte*>(codes.data()), codes.size()};
}

ChangesView ViewOf(const Changes& changes) {
  return {changes.position_coding, changes.value_coding, changes.count, changes.positions, changes.values};
}

absl::StatusOr<std::string> Applied(std::string chunk, const ChangesView& changes, size_t width) {
  auto applied = ApplyChanges(changes, width, absl::MakeSpan(reinterpret_cast<std::byte*>(chunk.data()), chunk.size()));
  if (!applied.ok()) return applied;
  return chunk;
}

// 16-bit codes.
std::string Codes(const std::vector<uint16_t>& codes) {
  return {reinterpret_cast<const char*>(codes.data()), codes.size() * 2};
}

class ChangesTest : public ::testing::TestWithParam<size_t> {
 protected:
  std::string Random(size_t elements) {
    std::string codes(elements * GetParam(), '\0');
    for (char& c : codes) c = static_cast<char>(random_());
    return codes;
  }
  // Changes about one element in `one_in`, by up to `most` steps of its code, or to any.
  std::string Changed(std::string codes, uint64_t one_in, uint64_t most) {
    const size_t width = GetParam();
    for (size_t i = 0; i < codes.size() / width; ++i) {
      if (random_() % one_in != 0) continue;
      uint64_t code = 0;
      std::memcpy(&code, codes.data() + i * width, width);
      code = most == 0 ? random_() : code + random_() % (2 * most + 1) - most;
      std::memcpy(codes.data() + i * width, &code, width);
    }
    return codes;
  }

  std::mt19937_64 random_{1};
};

TEST_P(ChangesTest, AppliedTheyGiveTheNewCodes) {
  std::vector<int> codings(8);
  for (const size_t elements : {1, 2, 63, 64, 65, 1000, 4097}) {
    for (const uint64_t one_in : {1, 2, 7, 90, 100000}) {
      for (const uint64_t most : {0, 1, 3}) {
        const std::string before = Random(elements), after = Changed(before, one_in, most);
        const auto changes = FindChanges(BytesOf(before), BytesOf(after), GetParam(), kNoLimit).changes;
        ASSERT_TRUE(changes.has_value());
        EXPECT_EQ(changes->count == 0, before == after);
        EXPECT_EQ(*Applied(before, ViewOf(*changes), GetParam()), after);
        ++codings[static_cast<size_t>(changes->position_coding) * 2 + static_cast<size_t>(changes->value_coding)];
      }
    }
  }
  EXPECT_GT(codings[2] + codings[3], 0) << "bitmap";
  EXPECT_GT(codings[4] + codings[5], 0) << "gaps";
  EXPECT_EQ(codings[3] + codings[5] > 0, GetParam() > 1) << "differences";
}

TEST_P(ChangesTest, MoreThanTheLimitIsNone) {
  const std::string before = Random(500), after = Changed(before, 10, 0);
  const uint64_t bytes = FindChanges(BytesOf(before), BytesOf(after), GetParam(), kNoLimit).changes->bytes();
  EXPECT_TRUE(FindChanges(BytesOf(before), BytesOf(after), GetParam(), bytes).changes.has_value());
  EXPECT_FALSE(FindChanges(BytesOf(before), BytesOf(after), GetParam(), bytes - 1).changes.has_value());
  EXPECT_TRUE(FindChanges(BytesOf(before), BytesOf(before), GetParam(), 0).changes.has_value());
}

TEST_P(ChangesTest, WhateverComesIsAppliedOrRefused) {
  for (int round = 0; round < 20000; ++round) {
    const size_t elements = 1 + random_() % 70;
    std::string positions(random_() % 12, '\0'), values(random_() % 40, '\0');
    for (char& c : positions) c = static_cast<char>(random_() % (round % 2 == 0 ? 256 : 9));
    for (char& c : values) c = static_cast<char>(random_());
    const ChangesView view{static_cast<PositionCoding>(random_() % 4), static_cast<ValueCoding>(random_() % 2),
                           random_() % 12, positions, values};
    Applied(Random(elements), view, GetParam()).status().IgnoreError();  // it may not touch what is not the chunk's
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, ChangesTest, ::testing::Values(1, 2, 4));

TEST(ChangesCodingTest, OneStepUpAndDownTakeAByteEach) {
  const std::string before = Codes({7, 0x8001, 9, 9}), after = Codes({8, 0x8000, 9, 9});
  const Changes changes = *FindChanges(BytesOf(before), BytesOf(after), 2, kNoLimit).changes;
  EXPECT_EQ(changes.value_coding, ValueCoding::kDifferences);
  EXPECT_EQ(changes.values, "\x02\x01");
  EXPECT_EQ(changes.count, 2u);
}

TEST(ChangesCodingTest, ARunTakesTwoNumbers) {
  std::vector<uint16_t> before(10000), after(10000);
  for (size_t i = 200; i < 500; ++i) after[i] = 1;
  const Changes changes = *FindChanges(BytesOf(Codes(before)), BytesOf(Codes(after)), 2, kNoLimit).changes;
  EXPECT_EQ(changes.position_coding, PositionCoding::kRuns);
  EXPECT_EQ(changes.positions, "\xc8\x01\xab\x02");  // 200, 300 - 1
}

TEST(ChangesCodingTest, ScatteredOnesAreGapsAndDenseOnesABitmap) {
  std::vector<uint16_t> before(4096), scattered(4096), dense(4096);
  for (size_t i = 0; i < 4096; i += 100) scattered[i] = 1;
  for (size_t i = 0; i < 4096; i += 3) dense[i] = 1;
  const auto coding = [&](const std::vector<uint16_t>& after) {
    return FindChanges(BytesOf(Codes(before)), BytesOf(Codes(after)), 2, kNoLimit).changes->position_coding;
  };
  EXPECT_EQ(coding(scattered), PositionCoding::kGaps);
  EXPECT_EQ(coding(dense), PositionCoding::kBitmap);
}

TEST(ChangesCodingTest, AWholeChunkHasNoPositions) {
  const std::string before = Codes({1, 2, 3}), after = Codes({4, 5, 6});
  EXPECT_EQ(*Applied(before, {PositionCoding::kAll, ValueCoding::kCodes, 3, "", after}, 2), after);
}

TEST(ChangesCodingTest, MalformedOnesAreRefusedByName) {
  const std::string chunk = Codes({1, 2, 3, 4});
  const auto said = [&](const ChangesView& changes) {
    const auto applied = Applied(chunk, changes, 2);
    EXPECT_EQ(applied.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(applied.status().message());
  };
  using enum PositionCoding;
  using enum ValueCoding;
  EXPECT_THAT(said({kGaps, kCodes, 5, "", ""}), HasSubstr("more of them than elements"));
  EXPECT_THAT(said({kAll, kCodes, 3, "", Codes({1, 2, 3})}), HasSubstr("all elements are said"));
  EXPECT_THAT(said({kGaps, kCodes, 1, "\x01", "abc"}), HasSubstr("the values' length"));
  EXPECT_THAT(said({kGaps, kCodes, 1, "\x04", "ab"}), HasSubstr("position 0 is missing, or past the chunk's end"));
  EXPECT_THAT(said({kGaps, kCodes, 1, "\x81", "ab"}), HasSubstr("position 0"));
  EXPECT_THAT(said({kGaps, kCodes, 1, absl::string_view("\x01\x00", 2), "ab"}), HasSubstr("something follows"));
  EXPECT_THAT(said({kBitmap, kCodes, 1, "\x03", "ab"}), HasSubstr("something follows"));
  EXPECT_THAT(said({kBitmap, kCodes, 1, "\x10", "ab"}), HasSubstr("position 0"));
  EXPECT_THAT(said({kBitmap, kCodes, 1, absl::string_view("\x01\x00", 2), "ab"}), HasSubstr("position 0"));
  EXPECT_THAT(said({kBitmap, kCodes, 1, "\x11", "ab"}), HasSubstr("something follows"));
  EXPECT_THAT(said({kRuns, kCodes, 1, absl::string_view("\x00\x01", 2), "ab"}), HasSubstr("something follows"));
  EXPECT_THAT(said({kRuns, kCodes, 2, absl::string_view("\x03\x01", 2), "abcd"}), HasSubstr("position 1"));
  EXPECT_THAT(said({kGaps, kDifferences, 1, "\x01", ""}), HasSubstr("value 0 is missing"));
  EXPECT_THAT(said({kGaps, kDifferences, 1, "\x01", "\x01\x01"}), HasSubstr("something follows"));
}

}  // namespace
}  // namespace ballast
