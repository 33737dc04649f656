// Waits for something that is published a little later than its cause: a status board, a counter, a line of a log, a
// file.
//
//   EXPECT_SOON(RankLine(*client), HasSubstr("transport grpc"));  // asks again until it matches
//   ASSERT_TRUE(Soon([&] { return cuts > 5; }));
//
// Both give up after a minute, which is enough on any machine, however busy.
#pragma once

#include <gmock/gmock.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ballast {

template <typename Holds>
bool Soon(Holds holds) {
  const absl::Time give_up = absl::Now() + absl::Minutes(1);
  absl::Notification never;  // nothing announces it
  while (!holds()) {
    if (absl::Now() > give_up) return false;
    never.WaitForNotificationWithTimeout(absl::Milliseconds(1));
  }
  return true;
}

// What `read` returned when it matched, or last.
template <typename Read, typename Matcher>
auto Settled(Read read, const Matcher& matcher) {
  auto value = read();
  Soon([&] { return ::testing::Value(value, matcher) || (value = read(), false); });
  return value;
}

}  // namespace ballast

#define EXPECT_SOON(value, matcher) EXPECT_THAT(::ballast::Settled([&] { return value; }, matcher), matcher)
