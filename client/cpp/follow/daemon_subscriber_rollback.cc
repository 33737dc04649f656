// A subscriber that goes to a version that has a name, and back to the newest ones.
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/follow/daemon_subscriber.h"
#include "client/cpp/follow/version_tags.h"

namespace ballast {

absl::Status DaemonSubscriber::CheckRollback(Connection& connection, const SubscribeOptions& subscription,
                                             const std::string& tag) {
  if (!subscription.average) return CheckTag(connection, subscription.run_id, tag);
  return absl::InvalidArgumentError(absl::StrCat("going to version '", tag, "' of run '", subscription.run_id,
                                                 "' in a subscription to an average of its weights: names are of "
                                                 "versions of the weights; subscribe without an average"));
}

absl::Status DaemonSubscriber::Rollback(const std::string& tag) {
  if (auto s = CheckRollback(*connection_, subscription_, tag); !s.ok()) return s;
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
