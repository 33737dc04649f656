#include "client/cpp/follow/version_tags.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/transport/retry.h"

namespace ballast {
namespace {

absl::Status OlderThanTags(const Connection& connection) {
  return absl::UnimplementedError(absl::StrCat("the daemon at ", connection.server(),
                                               " is older than this client, and keeps no versions by name: update it"));
}

template <typename Response, typename Request>
absl::StatusOr<Response> Ask(Connection& connection, const std::string& what,
                             grpc::Status (v1::FollowService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                             Response*),
                             const Request& request, absl::Duration timeout = Connection::kCallTimeout) {
  auto answer = CallAgain(connection, absl::StrCat(what, " run '", request.run_id(), "'"), connection.follow(), method,
                          request, timeout);
  if (absl::IsUnimplemented(answer.status())) return OlderThanTags(connection);
  return answer;
}

}  // namespace

absl::StatusOr<v1::TagVersionResponse> TagVersion(Connection& connection, const v1::TagVersionRequest& request) {
  return Ask<v1::TagVersionResponse>(connection, absl::StrCat("naming a version '", request.name(), "' of"),
                                     &v1::FollowService::Stub::TagVersion, request, Connection::kStorageTimeout);
}

absl::Status UntagVersion(Connection& connection, const std::string& run_id, const std::string& name) {
  v1::UntagVersionRequest request;
  request.set_run_id(run_id);
  request.set_name(name);
  return Ask<v1::UntagVersionResponse>(connection, absl::StrCat("taking the name '", name, "' from"),
                                       &v1::FollowService::Stub::UntagVersion, request)
      .status();
}

absl::StatusOr<v1::ListVersionsResponse> ListVersions(Connection& connection, const std::string& run_id) {
  v1::ListVersionsRequest request;
  request.set_run_id(run_id);
  return Ask<v1::ListVersionsResponse>(connection, "listing the versions of", &v1::FollowService::Stub::ListVersions,
                                       request);
}

absl::Status CheckTag(Connection& connection, const std::string& run_id, const std::string& name) {
  const auto list = ListVersions(connection, run_id);
  if (!list.ok()) return list.status();
  std::vector<std::string> names;
  for (const v1::TaggedVersion& tag : list->tags()) {
    names.push_back(absl::StrCat("'", tag.name(), "'"));
    if (tag.name() != name) continue;
    if (tag.unreadable().empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("version '", name, "': ", tag.unreadable()));
  }
  return absl::NotFoundError(absl::StrCat("run '", run_id, "' has no version of the name '", name,
                                          "'; names: ", names.empty() ? "none" : absl::StrJoin(names, ", ")));
}

}  // namespace ballast
