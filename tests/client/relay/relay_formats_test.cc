// A relay has weights as they are served alone: what else readers follow where the run trains, it refuses by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/follow/followed_training.h"
#include "tests/client/relay/relay_daemon.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

TEST(RelayFormatsTest, WeightsAreServedAsTheyAreServedAbove) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "fp32", /*rewinds=*/false, {"bf16"});
  const RealDaemon relay(RelayOf(daemon.address()));
  const auto follow = [&](const std::string& format) {
    return Subscriber::Open({.server = relay.address(), .log = [](const std::string&) {}},
                            {.run_id = kRun, .format = format})
        .value();
  };
  const auto served = Follow(relay.address()), named = follow("fp32");
  training.Train(1);
  for (Subscriber* reader : {served.get(), named.get()}) {
    Reach(*reader, 1);
    EXPECT_EQ(Here(*reader), training.Pulled());
  }
  const absl::Status refused = follow("bf16")->Next(kSoonS).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("this daemon is a relay of " + daemon.address()));
}

}  // namespace
}  // namespace ballast
