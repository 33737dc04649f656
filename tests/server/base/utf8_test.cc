#include "server/base/utf8.h"

#include "gtest/gtest.h"

namespace ballast {
namespace {

TEST(ValidUtf8Test, InvalidBytesAreReplacedOneByOne) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(ValidUtf8("gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x98\x80"),
            "gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x98\x80");
  EXPECT_EQ(ValidUtf8("\xC0\xAF"), r + r) << "overlong";
  EXPECT_EQ(ValidUtf8("\xED\xA0\x80"), r + r + r) << "surrogate";
  EXPECT_EQ(ValidUtf8("\xF4\x90\x80\x80"), r + r + r + r) << "beyond U+10FFFF";
  EXPECT_EQ(ValidUtf8("a\xE2\x82"), "a" + r + r) << "cut short";
  EXPECT_EQ(ValidUtf8("\x80"
                      "a"),
            r + "a");
}

}  // namespace
}  // namespace ballast
