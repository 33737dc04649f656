// Who gets the weights when: what is declined is not granted, however late it comes.
#include "client/cpp/follow/version_exchange.h"

#include <gtest/gtest.h>

#include <thread>

namespace ballast {
namespace {

constexpr absl::Duration kExchangedSoon = absl::Seconds(60);

v1::VersionId ExchangedId(uint64_t step) {
  v1::VersionId id;
  id.set_step(step);
  id.set_generation(1);
  return id;
}

// An exchange whose caller has the weights of step 1.
class VersionExchangeTest : public ::testing::Test {
 protected:
  VersionExchangeTest() {
    exchange_.Begin();
    EXPECT_TRUE(exchange_.TakeWeights(/*all_here=*/false, ExchangedId(1)));
    exchange_.Publish({.step = 1}, ExchangedId(1));
    EXPECT_EQ((*exchange_.Next(absl::ZeroDuration()))->step, 1u);
  }
  void AwaitOffer() {
    for (uint64_t seen = 0; !exchange_.standing().offered; seen = changes_->count()) {
      ASSERT_TRUE(changes_->AwaitMore(seen, absl::Now() + kExchangedSoon));
    }
  }

  const std::shared_ptr<ChangeSignal> changes_ = std::make_shared<ChangeSignal>();
  VersionExchange exchange_{changes_};
};

// The second time perhaps before it has woken up.
TEST_F(VersionExchangeTest, AReceiverThatWaitsIsDeclined) {
  std::thread receiver([&] { EXPECT_FALSE(exchange_.TakeWeights(/*all_here=*/true, ExchangedId(2))); });
  AwaitOffer();
  exchange_.Decline();
  exchange_.Decline();
  receiver.join();
  EXPECT_TRUE(exchange_.readable());
}

// It has read a version, and who declines comes before it waits with that. Otherwise the caller would let it in, and the
// version, whose call is over, would never be written to its end.
TEST_F(VersionExchangeTest, WhatADeclinedCallBringsLaterIsNotOffered) {
  exchange_.Decline();
  for (const bool all_here : {false, true}) EXPECT_FALSE(exchange_.TakeWeights(all_here, ExchangedId(2)));
  EXPECT_FALSE(exchange_.standing().offered.has_value());
  EXPECT_TRUE(exchange_.readable());

  exchange_.Begin();
  std::thread receiver([&] { EXPECT_TRUE(exchange_.TakeWeights(/*all_here=*/false, ExchangedId(3))); });
  AwaitOffer();
  EXPECT_FALSE((*exchange_.Next(absl::ZeroDuration())).has_value());
  receiver.join();
  EXPECT_FALSE(exchange_.readable());
}

// The caller has not heard of it yet, and would take it for the version before.
TEST_F(VersionExchangeTest, AVersionThatCameWholeIsReadOnceNextHasReturnedIt) {
  exchange_.Begin();
  std::thread receiver([&] { EXPECT_TRUE(exchange_.TakeWeights(/*all_here=*/false, ExchangedId(2))); });
  AwaitOffer();
  EXPECT_FALSE((*exchange_.Next(absl::ZeroDuration())).has_value());
  receiver.join();
  exchange_.Publish({.step = 2}, ExchangedId(2));
  EXPECT_FALSE(exchange_.readable());
  EXPECT_EQ((*exchange_.Next(absl::ZeroDuration()))->step, 2u);
  EXPECT_TRUE(exchange_.readable());
}

// Weights of no version are the receiver's already.
TEST_F(VersionExchangeTest, SoItIsWhereTheWeightsAreOfNoVersion) {
  std::thread receiver([&] { EXPECT_TRUE(exchange_.TakeWeights(/*all_here=*/false, ExchangedId(2))); });
  AwaitOffer();
  EXPECT_FALSE((*exchange_.Next(absl::ZeroDuration())).has_value());
  receiver.join();
  exchange_.Decline();
  EXPECT_FALSE(exchange_.TakeWeights(/*all_here=*/false, ExchangedId(3)));
}

}  // namespace
}  // namespace ballast
