#include "server/ops/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#include "server/base/clock.h"

namespace ballast {
namespace {

TEST(WatchdogTest, TellsWhileAllIsWellAndThenWhatIsNot) {
  std::atomic<bool> well = true;
  absl::Notification told, silent;
  std::string why;
  const auto once = [](absl::Notification* n) {
    if (!n->HasBeenNotified()) n->Notify();
  };
  const Watchdog watchdog({.live = [&] { return well ? absl::OkStatus() : absl::UnavailableError("the port is deaf"); },
                           .look_every_s = 0.001,
                           .tell = [&] { once(&told); },
                           .most_silent_s = 0.02,
                           .on_silent =
                               [&](const absl::Status& status) {
                                 if (!silent.HasBeenNotified()) why = std::string(status.message());
                                 once(&silent);
                               }});
  ASSERT_TRUE(told.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_FALSE(silent.HasBeenNotified());
  well = false;
  ASSERT_TRUE(silent.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_EQ(why, "the port is deaf");
}

// After the machine or a debugger held the process, a check that fails has its whole time again.
TEST(WatchdogTest, TheTimeThatTheWholeProcessStoodStillDoesNotCount) {
  std::atomic<int> looks = 0, looks_until_silent = 0;
  absl::Notification silent;
  const auto live = [&] {
    const double began_s = MonotonicSeconds();
    for (const bool held = looks++ == 0; held && MonotonicSeconds() < began_s + 0.05;) continue;
    return absl::UnavailableError("busy");
  };
  const Watchdog watchdog(
      {.live = live, .look_every_s = 0.001, .most_silent_s = 0.02, .on_silent = [&](const absl::Status&) {
         if (silent.HasBeenNotified()) return;
         looks_until_silent = looks.load();
         silent.Notify();
       }});
  ASSERT_TRUE(silent.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_GE(looks_until_silent, 10);
}

TEST(WatchdogTest, ABriefFailureIsForgivenAndWithoutALimitAnyFailure) {
  std::atomic<int> looks = 0;
  absl::Notification enough;
  const auto at_times = [&] {
    if (++looks == 100) enough.Notify();
    return looks % 2 == 0 ? absl::OkStatus() : absl::UnavailableError("busy");
  };
  const auto never = [&] { return ++looks, absl::UnavailableError("busy"); };
  {
    const Watchdog watchdog(
        {.live = at_times, .look_every_s = 0.001, .most_silent_s = 1000, .on_silent = [](const absl::Status&) {
           ADD_FAILURE();
         }});
    ASSERT_TRUE(enough.WaitForNotificationWithTimeout(absl::Seconds(30)));
  }
  const Watchdog unlimited({.live = never,
                            .look_every_s = 0.001,
                            .tell = [] { ADD_FAILURE(); },
                            .on_silent = [](const absl::Status&) { ADD_FAILURE(); }});
}

}  // namespace
}  // namespace ballast
