#include "proto/shm/bell.h"

#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <thread>

#include "tests/proto/shm/pair.h"

namespace ballast {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ShmPair;

class ShmBellTest : public ::testing::Test {
 protected:
  ShmPair pair_;
  ShmBell* const rung_ = &pair_.trainer->control().daemon_bell;
  ShmWaiter waiter_{&pair_.daemon->control().daemon_bell};
};

TEST_F(ShmBellTest, AWaiterDoesNotSleepWhenReady) {
  EXPECT_TRUE(waiter_.Await(seconds(0), [] { return true; }));
}

TEST_F(ShmBellTest, ATimeoutSaysSo) {
  const auto began = ShmWaiter::Clock::now();
  EXPECT_FALSE(waiter_.Await(milliseconds(5), [] { return false; }));
  EXPECT_GE(ShmWaiter::Clock::now() - began, milliseconds(5));
}

TEST_F(ShmBellTest, ASleeperIsWoken) {
  std::atomic<bool> ready = false;
  std::thread other([&] {
    while (rung_->asleep == 0) std::this_thread::yield();
    ready = true;
    Ring(rung_);
  });
  EXPECT_TRUE(waiter_.Await(seconds(60), [&] { return ready.load(); }));
  other.join();
}

// A wake-up lost between the look and the sleep would end in the timeout.
TEST_F(ShmBellTest, NoRingIsLost) {
  std::atomic<int> turn = 0;
  constexpr int kTurns = 20000;
  ShmBell* const back = &pair_.daemon->control().trainer_bell;
  std::thread other([&] {
    ShmWaiter waiter(&pair_.trainer->control().trainer_bell);
    for (int i = 0; i < kTurns; ++i) {
      EXPECT_TRUE(waiter.Await(seconds(60), [&] { return turn == 2 * i + 1; }));
      ++turn;
      Ring(rung_);
    }
  });
  for (int i = 0; i < kTurns; ++i) {
    ++turn;
    Ring(back);
    ASSERT_TRUE(waiter_.Await(seconds(60), [&] { return turn == 2 * i + 2; })) << i;
  }
  other.join();
}

double ThreadSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

TEST_F(ShmBellTest, WaitingLongCostsNoProcessor) {
  EXPECT_FALSE(waiter_.Await(milliseconds(1), [] { return false; }));
  const double began_s = ThreadSeconds();
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(waiter_.Await(milliseconds(20), [] { return false; }));
  EXPECT_LT(ThreadSeconds() - began_s, 0.01);
}

// A trainer may forge the bell so that nobody wakes: the waiter is late by the timeout, and no more.
TEST_F(ShmBellTest, AForgedBellDelaysByTheTimeout) {
  std::atomic<bool> ready = false;
  std::thread other([&] {
    while (rung_->asleep == 0) std::this_thread::yield();
    rung_->asleep = 0;
    ready = true;
    Ring(rung_);  // wakes nobody
  });
  for (bool over = false; !over;) {
    const bool late = ready;
    over = waiter_.Await(milliseconds(20), [&] { return ready.load(); });
    EXPECT_TRUE(over || !late);
  }
  other.join();
}

}  // namespace
}  // namespace ballast
