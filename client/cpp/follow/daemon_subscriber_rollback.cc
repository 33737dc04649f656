// A subscriber that goes to a version that has a name, and back to the newest ones.
#include <utility>

#include "client/cpp/follow/daemon_subscriber.h"
#include "client/cpp/follow/subscribed_series.h"
#include "client/cpp/follow/version_tags.h"

namespace ballast {

absl::Status DaemonSubscriber::Rollback(const std::string& tag) {
  if (auto s = CheckNameable(subscription_, tag); !s.ok()) return s;
  if (auto s = CheckTag(*connection_, subscription_.run_id, tag); !s.ok()) return s;
  Turn(tag);
  return absl::OkStatus();
}

void DaemonSubscriber::Turn(std::string tag) {
  absl::MutexLock lock(&mu_);
  tag_ = std::move(tag);
  ++turns_;
  if (call_ != nullptr) call_->TryCancel();
}

void DaemonSubscriber::LearnWanted() {
  absl::MutexLock lock(&mu_);
  asked_ = tag_;
  turn_ = turns_;
}

bool DaemonSubscriber::HasTurned() {
  absl::MutexLock lock(&mu_);
  return turns_ != turn_;
}

void DaemonSubscriber::AwaitTurn() {
  absl::MutexLock lock(&mu_);
  const auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return turns_ != turn_ || *closing_; };
  mu_.Await(absl::Condition(&over));
}

}  // namespace ballast
