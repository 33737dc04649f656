#include "client/cpp/follow/version_exchange.h"

#include <utility>

namespace ballast {

bool VersionExchange::TakeWeights(bool all_here) {
  absl::MutexLock lock(&mu_);
  wanted_ = !receivers_;
  const auto free = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return receivers_ || granted_ || closed_; };
  mu_.Await(absl::Condition(&free));
  wanted_ = false;
  if (closed_) return false;
  receivers_ = true;
  all_here_ = all_here;
  return true;
}

void VersionExchange::Publish(FollowedVersion version) {
  absl::MutexLock lock(&mu_);
  version_ = std::move(version);
  receivers_ = all_here_ = granted_ = false;
}

void VersionExchange::GiveBack() {
  absl::MutexLock lock(&mu_);
  receivers_ = all_here_ = false;
}

void VersionExchange::Spoil() {
  absl::MutexLock lock(&mu_);
  all_here_ = false;
}

void VersionExchange::Fail(absl::Status status) {
  absl::MutexLock lock(&mu_);
  failure_ = std::move(status);
  all_here_ = false;
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
  return !receivers_;
}

void VersionExchange::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
}

bool VersionExchange::closed() const {
  absl::MutexLock lock(&mu_);
  return closed_;
}

}  // namespace ballast
