#include "client/cpp/follow/subscribed_series.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"

#include "ballast/v1/follow.pb.h"
#include "client/cpp/wire/tensor_table.h"
#include "client/cpp/wire/wire_format.h"

namespace ballast {
namespace {

// Why a run without RunSpec.follow cannot be followed. A daemon that does not know that field says nothing of it.
absl::Status ExplainUnfollowed(Connection& connection, const std::string& run_id) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + Connection::kCallTimeout));
  v1::SubscribeRequest request;
  request.set_run_id(run_id);
  const auto reader = connection.follow().Subscribe(&context, request);
  v1::VersionPart part;
  if (reader->Read(&part)) context.TryCancel();
  while (reader->Read(&part)) continue;
  if (absl::IsUnimplemented(FromGrpc(reader->Finish()))) return OlderThanFollowing(connection);
  return absl::FailedPreconditionError(absl::StrCat(
      "run '", run_id, "' at ", connection.server(),
      " has no RunSpec.follow, so nobody may follow it: create the run with follow, or amend it (AmendRun)"));
}

absl::Status CheckAverage(const Connection& connection, const v1::RunSpec& spec, double decay) {
  const auto& kept = spec.averages();
  const bool keeps = std::find(kept.begin(), kept.end(), decay) != kept.end();
  if (keeps && spec.follow().averages()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "run '", spec.run_id(), "' at ", connection.server(), " has no average with the decay ", decay,
      " that may be followed: ",
      keeps ? "its follow is for the weights alone; create it with follow.averages, or amend it"
            : absl::StrCat("it keeps ", kept.empty() ? "none" : absl::StrJoin(kept, ", "), " (RunSpec.averages)")));
}

// A daemon that is older than formats says of none.
absl::Status CheckFormat(const Connection& connection, const v1::RunSpec& spec, const std::string& format) {
  const auto& there = spec.follow().formats();
  if (std::find(there.begin(), there.end(), format) != there.end()) return absl::OkStatus();
  const bool served = std::all_of(spec.tensors().begin(), spec.tensors().end(),
                                  [&](const v1::TensorSpec& t) { return ServingFormat(spec, t) == format; });
  if (served) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("run '", spec.run_id(), "' at ", connection.server(), " cannot be followed in format '", format,
                   "': readers may follow it as it is served",
                   there.empty() ? "" : absl::StrCat(", or in ", absl::StrJoin(there, ", ")),
                   "; create it with that in follow.formats, or amend it"));
}

}  // namespace

absl::Status OlderThanFollowing(const Connection& connection) {
  return absl::UnimplementedError(absl::StrCat("the daemon at ", connection.server(),
                                               " is older than this client, and no reader can follow its runs: "
                                               "update the daemon"));
}

absl::Status CheckSubscription(const SubscribeOptions& subscription) {
  const std::string& format = subscription.format;
  const std::string what = absl::StrCat("following run '", subscription.run_id, "'");
  if (!format.empty() && FindFormat(format) == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " in format '", format,
                     "', which this client does not know; wanted one as fp32, bf16, fp16, "
                     "fp8-e4m3, int8-row or int8-tensor"));
  }
  if (!format.empty() && subscription.average) {
    return absl::InvalidArgumentError(absl::StrCat(what, " in format '", format,
                                                   "' by an average of its weights: an average is followed as the "
                                                   "weights are served; leave one of them out"));
  }
  return subscription.tag.empty() ? absl::OkStatus() : CheckNameable(subscription, subscription.tag);
}

absl::Status CheckFollowed(Connection& connection, const v1::RunSpec& spec, const SubscribeOptions& subscription) {
  if (!spec.has_follow()) return ExplainUnfollowed(connection, subscription.run_id);
  if (subscription.average) return CheckAverage(connection, spec, *subscription.average);
  if (subscription.format.empty()) return absl::OkStatus();
  return CheckFormat(connection, spec, subscription.format);
}

absl::Status CheckNameable(const SubscribeOptions& subscription, const std::string& tag) {
  if (!subscription.average && subscription.format.empty()) return absl::OkStatus();
  const bool average = subscription.average.has_value();
  return absl::InvalidArgumentError(
      absl::StrCat("going to version '", tag, "' of run '", subscription.run_id, "' in a subscription ",
                   average ? "to an average of its weights" : absl::StrCat("in format '", subscription.format, "'"),
                   ": names are of versions of the weights as they are served; subscribe without ",
                   average ? "an average" : "a format"));
}

void ServeIn(const std::string& format, v1::RunSpec* spec) {
  if (format.empty()) return;
  for (v1::GroupSpec& group : *spec->mutable_groups()) group.set_serving(format);
  if (!FindFormat(format)->computes) return;
  for (v1::TensorSpec& tensor : *spec->mutable_tensors()) tensor.set_dtype(format);
}

}  // namespace ballast
