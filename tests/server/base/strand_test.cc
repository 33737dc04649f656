#include "server/base/strand.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

#include "server/base/clock.h"
#include "tests/server/no_threads.h"

namespace ballast {
namespace {

TEST(StrandTest, RunsInOrderAndStopRunsWhatWasPosted) {
  std::vector<int> ran;
  Strand strand({.name = "t"});
  for (int i = 0; i < 1000; ++i) strand.Post([&ran, i] { ran.push_back(i); });
  strand.Stop();
  ASSERT_EQ(ran.size(), 1000u);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(ran[static_cast<size_t>(i)], i);
}

TEST(StrandTest, PostAfterStopRunsAtOnce) {
  Strand strand({.name = "t"});
  strand.Stop();
  bool ran = false;
  strand.Post([&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(StrandTest, TicksWithoutBeingAsked) {
  absl::Notification ticked;
  Strand strand({.name = "t", .tick_s = 0.001, .tick = [&] {
                   if (!ticked.HasBeenNotified()) ticked.Notify();
                 }});
  ticked.WaitForNotification();
}

TEST(StrandTest, WhatFollowsFromTasksThatCameTogetherIsDoneOnce) {
  absl::Notification began, go_on;
  int ran = 0;
  std::vector<int> ran_before;  // each call
  {
    Strand strand({.name = "t", .tick_s = 0.001, .after = [&] { ran_before.push_back(ran); }});
    strand.Post([&] {
      began.Notify();
      go_on.WaitForNotification();
      ++ran;
    });
    began.WaitForNotification();
    for (int i = 0; i < 5; ++i) strand.Post([&] { ++ran; });
    go_on.Notify();
  }
  EXPECT_EQ(ran_before, (std::vector{1, 6}));
}

TEST(StrandTest, ATaskThatGetsOnIsNotBusyForLong) {
  absl::Notification began, end;  // the strand, which ends first, waits for them
  Strand strand({.name = "t"});
  strand.Progress();
  EXPECT_EQ(strand.busy_s(), 0) << "nothing is in hand";
  strand.Post([&] {
    began.Notify();
    end.WaitForNotification();
  });
  began.WaitForNotification();
  while (strand.busy_s() < 0.01) std::this_thread::yield();
  const double before_s = MonotonicSeconds();
  strand.Progress();
  const double busy_s = strand.busy_s();  // and then the time: a function's arguments have no order
  EXPECT_LE(busy_s, MonotonicSeconds() - before_s);
  end.Notify();
}

// Those who make runs know the end of memory.
TEST(StrandTest, WithoutAThreadItIsRefused) {
  const ballast::testing::NoThreads none;
  try {
    const Strand strand({.name = "t"});
    FAIL() << "it has one";
  } catch (const std::bad_alloc& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("raise the daemon's limit of processes: ulimit -u"));
  }
}

}  // namespace
}  // namespace ballast
