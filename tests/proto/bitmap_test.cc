#include "proto/bitmap.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(BitmapTest, BitIIsBitIModuloEightOfByteIOverEight) {
  std::vector<bool> bits(10);
  bits[0] = bits[9] = true;
  EXPECT_EQ(PackBits(bits), "\x01\x02");
  EXPECT_EQ(UnpackBits("\x01\x02", 10), bits);
  EXPECT_EQ(PackBits({}), "");
}

TEST(BitmapTest, EveryBitGoesThereAndBack) {
  for (size_t count = 0; count < 20; ++count) {
    for (size_t set = 0; set < count; ++set) {
      std::vector<bool> bits(count);
      bits[set] = true;
      EXPECT_EQ(UnpackBits(PackBits(bits), count), bits) << set << " of " << count;
    }
  }
}

TEST(BitmapTest, BytesThatAreLeftOutAreClear) {
  EXPECT_EQ(UnpackBits("", 2), std::vector<bool>(2));
  EXPECT_EQ(UnpackBits("\x01", 9), (std::vector<bool>{true, false, false, false, false, false, false, false, false}));
}

TEST(BitmapTest, BitsPastTheEndAreDroppedAndTold) {
  EXPECT_EQ(UnpackBits("\x15", 3), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(FirstBitPast("\x15", 3), 4u);
  EXPECT_EQ(FirstBitPast("\x15", 4), 4u);
  EXPECT_EQ(FirstBitPast("\x15", 5), std::nullopt);
  EXPECT_EQ(FirstBitPast(absl::string_view("\x00\x80", 2), 0), 15u);
  EXPECT_EQ(FirstBitPast("", 0), std::nullopt);
  EXPECT_EQ(FirstBitPast("\x01", 100), std::nullopt);
}

}  // namespace
}  // namespace ballast
