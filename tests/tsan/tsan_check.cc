// Whether the thread sanitizer knows of absl's locks: a number that two threads change, each under the same lock (`one`) or
// under its own (`own`), which it has to report; or that is handed on by a Notification and a BlockingCounter (`handed`).
#include <cstdio>
#include <string_view>
#include <thread>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace {

constexpr int kRounds = 1000;

int CountUnder(absl::Mutex* first, absl::Mutex* second) {
  int number = 0;
  const auto count = [&](absl::Mutex* mu) {
    for (int i = 0; i < kRounds; ++i) {
      absl::MutexLock lock(mu);
      ++number;
    }
  };
  std::thread other(count, first);
  count(second);
  other.join();
  return number;
}

int HandOn() {
  int number = 0;
  absl::Notification begun;
  absl::BlockingCounter done(1);
  std::thread other([&] {
    begun.WaitForNotification();
    number += kRounds;
    done.DecrementCount();
  });
  number += kRounds;
  begun.Notify();
  done.Wait();
  const int seen = number;
  other.join();
  return seen;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view how = argc == 2 ? argv[1] : "";
  absl::Mutex one, another;
  int number = 0;
  if (how == "one") number = CountUnder(&one, &one);
  if (how == "own") number = CountUnder(&one, &another);
  if (how == "handed") number = HandOn();
  std::printf("%d\n", number);
  return number == 2 * kRounds ? 0 : 1;
}
