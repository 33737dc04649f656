// For how long the readers of a run's parts wait for each other, or for a step that they were told, until they go on to what
// there is: the run may be at rest. At least `least`, and three times as long as they took to come to the same version last;
// each time that it is over in vain, twice as long.
//
// Pure: its caller has the clock. Thread-compatible.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/time/time.h"

namespace ballast {

class Patience {
 public:
  Patience(absl::Duration least, absl::Time now) : least_(least), since_(now) {}

  // Some part has come to a version that was not handed out. While nothing is new nobody waits for anybody.
  void OnNew(absl::Time now) {
    if (began_) return;
    began_ = since_ = now;
  }
  // All have come to the same.
  void OnAgreed(absl::Time now) {
    took_ = began_ ? now - *std::exchange(began_, std::nullopt) : absl::ZeroDuration();
    since_ = now;
    doublings_ = 0;
  }
  // Some part was told what to wait for.
  void OnTold(absl::Time now) { since_ = now; }

  // When it is over.
  absl::Time until() const { return since_ + (least_ + kTimes * took_) * (1 << doublings_); }
  void OnOver(absl::Time now) {
    since_ = now;
    doublings_ = std::min(doublings_ + 1, kMostDoublings);
  }

 private:
  static constexpr int kTimes = 3, kMostDoublings = 6;

  const absl::Duration least_;
  absl::Time since_;
  std::optional<absl::Time> began_ = {};  // to come to one
  absl::Duration took_ = absl::ZeroDuration();
  int doublings_ = 0;
};

}  // namespace ballast
