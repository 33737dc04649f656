#include "proto/shm/pulse.h"

#include <gtest/gtest.h>

#include "tests/proto/shm/pair.h"

namespace ballast {
namespace {

TEST(ShmPulseTest, AnEndThatDoesNotBeatIsLostAndOneThatDoesIsNot) {
  const testing::ShmPair pair;
  ShmControl &daemon = pair.daemon->control(), &trainer = pair.trainer->control();
  ShmPulse watching(&daemon.daemon_beats, &daemon.trainer_beats);
  ShmPulse beating(&trainer.trainer_beats, &trainer.daemon_beats);
  auto now = ShmPulse::Clock::now();
  for (int i = 0; i < 10; ++i) {
    beating.Beat();
    now += ShmPulse::kDead;
    EXPECT_FALSE(watching.Lost(now)) << i;
  }
  EXPECT_FALSE(watching.Lost(now + ShmPulse::kDead));
  EXPECT_TRUE(watching.Lost(now + ShmPulse::kDead + std::chrono::milliseconds(1)));
}

}  // namespace
}  // namespace ballast
