#include "proto/amounts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace ballast {
namespace {

using ::testing::HasSubstr;

TEST(AmountsTest, SizesAreReadAsTheyAreWritten) {
  const std::pair<const char*, uint64_t> sizes[] = {{"0", 0},
                                                    {"17", 17},
                                                    {"1B", 1},
                                                    {"2KiB", 2048},
                                                    {"3 MiB", 3 << 20},
                                                    {"1TiB", 1ULL << 40},
                                                    {"5KB", 5'000},
                                                    {"6MB", 6'000'000},
                                                    {"2GB", 2'000'000'000},
                                                    {"16777215TiB", 16777215ULL << 40}};
  for (const auto& [text, bytes] : sizes) {
    const auto read = ReadBytes(text);
    ASSERT_TRUE(read.ok()) << text;
    EXPECT_EQ(*read, bytes) << text;
    EXPECT_EQ(*ReadBytes(BytesText(bytes)), bytes) << text;
  }
  EXPECT_EQ(BytesText(3 << 20), "3MiB");
  EXPECT_EQ(BytesText(1500), "1500");
  EXPECT_EQ(BytesText(0), "0");
}

TEST(AmountsTest, WhatIsNoAmountIsRefused) {
  for (const char* text : {"", "-1", "+1", "1.5GiB", "GiB", "1 Gi", "0x10", "16777216TiB", "18446744073709551616"}) {
    EXPECT_THAT(ReadBytes(text).status().message(), HasSubstr("is not a size; write it as 64MiB, 64MB or bytes"))
        << text;
  }
  for (const char* text : {"", "-1", "+1", "3KiB", "1e3", "18446744073709551616"}) {
    EXPECT_THAT(ReadCount(text).status().message(), HasSubstr("is not a whole number")) << text;
  }
  EXPECT_EQ(*ReadCount("18446744073709551615"), std::numeric_limits<uint64_t>::max());
}

}  // namespace
}  // namespace ballast
