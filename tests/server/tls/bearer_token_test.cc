#include "server/tls/bearer_token.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "proto/tls/token_file.h"

#include "tests/certificates.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr char kToken[] = "0123456789abcdef";

TEST(BearerTokenTest, AFileOfItsOwnersAloneIsRead) {
  const TestCertificates files;
  EXPECT_EQ(ReadToken(files.Write("token", std::string(" ") + kToken + "\n", 0600)).value(), kToken);
  const auto error = [&](const std::string& text, mode_t mode = 0600) {
    return std::string(ReadToken(files.Write("token", text, mode)).status().message());
  };
  EXPECT_THAT(error(kToken, 0644), HasSubstr("chmod 600"));
  for (const char* text : {"", "0123456789abcde", "0123456789 abcdef", "0123456789abcdef\n0123456789abcdef"}) {
    EXPECT_THAT(error(text), HasSubstr("token: holds no token"));
  }
}

TEST(BearerTokenTest, OnlyTheTokenItselfCounts) {
  const auto basic = [](const std::string& text) { return "Basic " + absl::Base64Escape(text); };
  EXPECT_TRUE(BringsToken(std::string("Bearer ") + kToken, kToken));
  EXPECT_TRUE(BringsToken(std::string("bearer ") + kToken, kToken));
  EXPECT_TRUE(BringsToken(basic(std::string("anybody:") + kToken), kToken));
  for (const std::string& wrong :
       {std::string(""), std::string(kToken), std::string("Bearer "), std::string("Bearer 0123456789abcdeg"),
        std::string("Bearer 0123456789abcdef0"), std::string("Basic ???"), basic(kToken), basic("a:b")}) {
    EXPECT_FALSE(BringsToken(wrong, kToken)) << wrong;
  }
}

}  // namespace
}  // namespace ballast
