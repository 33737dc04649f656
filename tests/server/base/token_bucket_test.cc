#include "server/base/token_bucket.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

constexpr TokenBucket::Rate kRate{.per_second = 2, .at_once = 4};

TEST(TokenBucketTest, HoldsSoManyAndFillsAtItsRate) {
  TokenBucket bucket;
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(bucket.Take(kRate, 10));
  EXPECT_FALSE(bucket.Take(kRate, 10));
  EXPECT_EQ(bucket.WaitS(kRate, 10), 0.5);
  EXPECT_FALSE(bucket.Take(kRate, 10.25));
  EXPECT_TRUE(bucket.Take(kRate, 10.5));
  EXPECT_FALSE(bucket.Full(kRate, 11));
  EXPECT_TRUE(bucket.Full(kRate, 13));
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(bucket.Take(kRate, 1000)) << "and holds no more";
  EXPECT_FALSE(bucket.Take(kRate, 1000));
}

TEST(TokenBucketTest, AChargeIsNotOwedForLongerThanTheBucketTakesToFill) {
  TokenBucket bucket;
  for (int i = 0; i < 100; ++i) bucket.Charge(kRate, 10);
  EXPECT_EQ(bucket.WaitS(kRate, 10), 0.5);
}

TEST(TokenBucketTest, AClockThatGoesBackFillsNothing) {
  TokenBucket bucket;
  for (int i = 0; i < 4; ++i) bucket.Charge(kRate, 10);
  EXPECT_FALSE(bucket.Take(kRate, 9));
  EXPECT_TRUE(bucket.Take(kRate, 9.5));
}

}  // namespace
}  // namespace ballast
