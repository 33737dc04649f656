#include "server/base/lifeline.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace ballast {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

class LifelineTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(pipe2(ends_.data(), O_CLOEXEC), 0); }
  void TearDown() override {
    CloseOther();
    close(ends_[0]);
  }
  void CloseOther() {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }

  std::array<int, 2> ends_{-1, -1};
  absl::Notification ended_;
};

TEST_F(LifelineTest, TellsOnceThatTheOtherEndWasClosed) {
  std::atomic<int> calls = 0;
  {
    const Lifeline lifeline(ends_[0], [&] {
      ++calls;
      ended_.Notify();
    });
    CloseOther();
    EXPECT_TRUE(ended_.WaitForNotificationWithTimeout(kLong));
  }
  EXPECT_EQ(calls, 1);
}

TEST_F(LifelineTest, WhatIsWrittenEndsNothing) {
  const Lifeline lifeline(ends_[0], [&] { ended_.Notify(); });
  const std::array<char, 1000> text{};
  ASSERT_EQ(write(ends_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  EXPECT_FALSE(ended_.HasBeenNotified());
  CloseOther();
  EXPECT_TRUE(ended_.WaitForNotificationWithTimeout(kLong));
}

TEST_F(LifelineTest, TellsThatTheProcessWasKilled) {
  const pid_t holder = fork();
  ASSERT_GE(holder, 0);
  if (holder == 0) {
    while (true) pause();
  }
  CloseOther();
  const Lifeline lifeline(ends_[0], [&] { ended_.Notify(); });
  EXPECT_FALSE(ended_.HasBeenNotified());
  kill(holder, SIGKILL);
  EXPECT_TRUE(ended_.WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(waitpid(holder, nullptr, 0), holder);
}

TEST_F(LifelineTest, AnEmptyFileEndsAtOnce) {
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const Lifeline lifeline(null, [&] { ended_.Notify(); });
  EXPECT_TRUE(ended_.WaitForNotificationWithTimeout(kLong));
  close(null);
}

TEST_F(LifelineTest, GoesBeforeTheOtherEndWithoutACall) {
  {
    const Lifeline lifeline(ends_[0], [&] { ended_.Notify(); });
  }
  CloseOther();
  EXPECT_FALSE(ended_.HasBeenNotified());
}

}  // namespace
}  // namespace ballast
