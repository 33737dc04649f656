// For how long the readers of a run's parts wait for each other, by a clock that a test has.
#include "client/cpp/parts/patience.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

constexpr absl::Duration kSecond = absl::Seconds(1);

TEST(PatienceTest, ItGrowsWithWhatTheLastVersionTookAndEachTimeItIsOver) {
  absl::Time now = absl::UnixEpoch();
  Patience patience(kSecond, now);
  EXPECT_EQ(patience.until(), now + kSecond);
  patience.OnNew(now);
  patience.OnNew(now + kSecond);  // another part, of the same version
  now += 5 * kSecond;
  patience.OnAgreed(now);
  EXPECT_EQ(patience.until(), now + (1 + 3 * 5) * kSecond);
  now += kSecond;
  patience.OnTold(now);
  EXPECT_EQ(patience.until(), now + (1 + 3 * 5) * kSecond);
  for (const int times : {2, 4, 8, 16, 32, 64, 64}) {
    now = patience.until();
    patience.OnOver(now);
    EXPECT_EQ(patience.until(), now + times * (1 + 3 * 5) * kSecond);
  }
  patience.OnNew(now);
  patience.OnAgreed(now + kSecond);
  EXPECT_EQ(patience.until(), now + kSecond + (1 + 3) * kSecond);
}

TEST(PatienceTest, ARestOfTheRunIsNotWaitedFor) {
  const absl::Time now = absl::UnixEpoch(), later = now + absl::Hours(5);
  Patience patience(kSecond, now);
  patience.OnNew(now);
  patience.OnAgreed(now);
  patience.OnNew(later);
  EXPECT_EQ(patience.until(), later + kSecond);
  patience.OnAgreed(later + kSecond);
  EXPECT_EQ(patience.until(), later + kSecond + (1 + 3) * kSecond);
}

}  // namespace
}  // namespace ballast
