#include "server/sessions.h"

#include <gtest/gtest.h>

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
  EXPECT_FALSE(sessions.Find(first));
  EXPECT_TRUE(sessions.Find(other));
  EXPECT_NE(sessions.NewId(), sessions.NewId());
}

}  // namespace
}  // namespace ballast
