#include "server/metrics/recent_max.h"

#include "gtest/gtest.h"

namespace ballast {
namespace {

TEST(RecentMaxTest, KeepsTheMaximumOfASecondAndReusesItsSlot) {
  RecentMax max(1);
  EXPECT_EQ(max.Max(0, 5), std::nullopt);
  max.Observe(0, 3, 5.1);
  max.Observe(0, 2, 5.9);
  EXPECT_EQ(max.Max(0, 6), 3);
  max.Observe(0, 1, 65);
  EXPECT_EQ(max.Max(0, 65), 1);
}

}  // namespace
}  // namespace ballast
