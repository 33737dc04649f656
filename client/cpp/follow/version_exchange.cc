#include "client/cpp/follow/version_exchange.h"

#include <utility>

namespace ballast {

void VersionExchange::Begin() {
  absl::MutexLock lock(&mu_);
  declined_ = false;
}

bool VersionExchange::TakeWeights(bool all_here, std::optional<v1::VersionId> offered) {
  {
    absl::MutexLock lock(&mu_);
    wanted_ = !receivers_ && !declined_;
    offered_ = std::move(offered);
  }
  Tell();
  absl::MutexLock lock(&mu_);
  const auto over = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return receivers_ || granted_ || declined_ || closed_; };
  mu_.Await(absl::Condition(&over));
  wanted_ = false;
  offered_.reset();
  if (closed_ || declined_) return false;
  receivers_ = true;
  all_here_ = all_here;
  return true;
}

void VersionExchange::Publish(FollowedVersion version, const v1::VersionId& id) {
  {
    absl::MutexLock lock(&mu_);
    version_ = std::move(version);
    here_ = id;
    receivers_ = all_here_ = granted_ = false;
  }
  Tell();
}

void VersionExchange::GiveBack() {
  {
    absl::MutexLock lock(&mu_);
    receivers_ = all_here_ = false;
  }
  Tell();
}

void VersionExchange::Spoil() {
  absl::MutexLock lock(&mu_);
  all_here_ = false;
}

void VersionExchange::Fail(absl::Status status) {
  {
    absl::MutexLock lock(&mu_);
    failure_ = std::move(status);
    all_here_ = false;
  }
  Tell();
}

absl::StatusOr<std::optional<FollowedVersion>> VersionExchange::Next(absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  granted_ = !told();
  const auto there = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return told(); };
  mu_.AwaitWithTimeout(absl::Condition(&there), timeout);
  // What the receiver waits to write it takes at once, and what is all here it has written in a moment.
  const auto settled = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return told() || !(wanted_ || all_here_); };
  mu_.Await(absl::Condition(&settled));
  granted_ = false;
  if (closed_) return absl::CancelledError("the subscriber is closed");
  if (version_) return std::exchange(version_, std::nullopt);
  if (failure_) return *failure_;
  return std::optional<FollowedVersion>();
}

bool VersionExchange::Await(absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  const auto there = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return told() || wanted_; };
  return mu_.AwaitWithTimeout(absl::Condition(&there), timeout);
}

bool VersionExchange::readable() const {
  absl::MutexLock lock(&mu_);
  return !receivers_ && !version_;
}

HeldSubscriber::Standing VersionExchange::standing() const {
  absl::MutexLock lock(&mu_);
  HeldSubscriber::Standing standing{.told = told(), .waits = wanted_};
  if (wanted_) standing.offered = offered_;
  if (!receivers_) standing.here = here_;
  return standing;
}

void VersionExchange::Decline() {
  absl::MutexLock lock(&mu_);
  declined_ = true;
  wanted_ = false;
}

void VersionExchange::Close() {
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  Tell();
}

bool VersionExchange::closed() const {
  absl::MutexLock lock(&mu_);
  return closed_;
}

}  // namespace ballast
