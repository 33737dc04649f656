#include "proto/checksum.h"

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

namespace ballast {
namespace {

absl::Span<const std::byte> Bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// The check value that catalogues of CRCs have for CRC-32C.
TEST(ChecksumTest, ACrcIsTheCatalogues) {
  EXPECT_EQ(Crc32c(Bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(Crc32c({}), 0u);
  EXPECT_EQ(ExtendCrc32c(Crc32c(Bytes("12345")), Bytes("6789")), 0xe3069283u);
}

TEST(ChecksumTest, ACopyIsTheBytesAndHasTheirCrc) {
  std::mt19937 random(1);
  for (const size_t bytes : {0, 1, 4095, 16 << 10, (16 << 10) + 1, 100'003}) {
    std::vector<std::byte> from(bytes), to(bytes + 1, std::byte{7});
    for (std::byte& b : from) b = static_cast<std::byte>(random());
    EXPECT_EQ(CopyCrc32c(to.data(), from), Crc32c(from)) << bytes;
    EXPECT_TRUE(std::equal(from.begin(), from.end(), to.begin())) << bytes;
    EXPECT_EQ(to.back(), std::byte{7}) << bytes;
  }
}

}  // namespace
}  // namespace ballast
