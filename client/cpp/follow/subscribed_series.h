// What a subscription is to: a run's weights as they are served, or in another format, or an average of them; and whether
// the run has it. Functions; thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "ballast/v1/run.pb.h"
#include "client/cpp/follow/subscriber.h"
#include "client/cpp/transport/connection.h"

namespace ballast {

absl::Status OlderThanFollowing(const Connection& connection);

// INVALID_ARGUMENT: the options exclude each other, or this client does not know the format.
absl::Status CheckSubscription(const SubscribeOptions& subscription);
// Of one that was checked. FAILED_PRECONDITION: the run cannot be followed, or not so; it says in which formats, or which
// averages, it can. UNIMPLEMENTED: the daemon is older than following.
absl::Status CheckFollowed(Connection& connection, const v1::RunSpec& spec, const SubscribeOptions& subscription);
// INVALID_ARGUMENT: versions that have names are not of what it is to.
absl::Status CheckNameable(const SubscribeOptions& subscription, const std::string& tag);

// Makes the spec that of a run which is served in this format, as Subscriber::spec says. Empty: leaves it.
void ServeIn(const std::string& format, v1::RunSpec* spec);

}  // namespace ballast
