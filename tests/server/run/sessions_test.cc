#include "server/run/sessions.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ballast {
namespace {

TEST(SessionsTest, ATokenNamesItsSession) {
  Sessions sessions;
  const SessionId id = sessions.NewId();
  const std::string token = sessions.Issue({"r1", id});
  EXPECT_EQ(token.size(), Sessions::kTokenBytes);
  ASSERT_TRUE(sessions.Find(token));
  EXPECT_EQ(sessions.Find(token)->run_id, "r1");
  EXPECT_EQ(sessions.Find(token)->id, id);
  EXPECT_FALSE(sessions.Find("garbage"));
  EXPECT_FALSE(sessions.Find(""));
  sessions.Forget("r1");
  EXPECT_FALSE(sessions.Find(token));
}

TEST(SessionsTest, OldTokensAreForgottenAndIdsNeverRepeat) {
  Sessions sessions;
  const std::string first = sessions.Issue({"r1", sessions.NewId()});
  const std::string other = sessions.Issue({"r2", sessions.NewId()});
  for (size_t i = 0; i < Sessions::kRemembered; ++i) sessions.Issue({"r1", sessions.NewId()});
  EXPECT_TRUE(sessions.Find(first));
  const std::string last = sessions.Issue({"r1", sessions.NewId()});
  EXPECT_FALSE(sessions.Find(first));
  EXPECT_TRUE(sessions.Find(last));
  EXPECT_TRUE(sessions.Find(other));
  EXPECT_NE(sessions.NewId(), sessions.NewId());
}

TEST(SessionsTest, WhateverARankDoesTheOthersKeepTheirTokens) {
  constexpr uint32_t kRanks = 100;
  Sessions sessions;
  std::vector<std::string> tokens;
  for (uint32_t rank = 0; rank < kRanks; ++rank) tokens.push_back(sessions.Issue({"r1", sessions.NewId(), rank}));
  for (size_t i = 0; i < 3 * Sessions::kRemembered; ++i) tokens[0] = sessions.Issue({"r1", sessions.NewId(), 0});
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_TRUE(sessions.Find(tokens[rank])) << rank;
    EXPECT_EQ(sessions.Find(tokens[rank])->rank, rank);
  }
  sessions.Forget("r1");
  for (const std::string& token : tokens) EXPECT_FALSE(sessions.Find(token));
}

TEST(SessionsTest, ATokenThatIsIssuedLateDoesNotDisplaceALaterSessions) {
  Sessions sessions;
  const SessionId before = sessions.NewId();
  const std::string later = sessions.Issue({"r1", sessions.NewId(), 0});
  const std::string late = sessions.Issue({"r1", before, 0});
  EXPECT_TRUE(sessions.Find(late));
  for (uint32_t i = 0; i < 2 * Sessions::kRemembered; ++i) sessions.Issue({"r1", sessions.NewId(), 1});
  EXPECT_TRUE(sessions.Find(later));
  EXPECT_FALSE(sessions.Find(late));
}

}  // namespace
}  // namespace ballast
