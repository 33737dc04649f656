#include "client/cpp/follow/subscriber.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "client/cpp/follow/daemon_subscriber.h"
#include "client/cpp/follow/own_subscriber.h"
#include "client/cpp/parts/parts_subscriber.h"

namespace ballast {

double FollowedVersion::StalenessSeconds() const {
  return std::max(0.0, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) - closed_unix_s);
}

namespace {

absl::StatusOr<std::unique_ptr<Subscriber>> OpenAt(ClientOptions options, const SubscribeOptions& subscription) {
  if (absl::StrContains(options.server, ',')) return PartsSubscriber::Open(std::move(options), subscription);
  return DaemonSubscriber::Open(std::move(options), subscription);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Subscriber>> Subscriber::Open(ClientOptions options,
                                                             const SubscribeOptions& subscription) {
  auto subscriber = OpenAt(std::move(options), subscription);
  if (!subscriber.ok()) return subscriber.status();
  return std::make_unique<OwnSubscriber>(*std::move(subscriber));
}

}  // namespace ballast
