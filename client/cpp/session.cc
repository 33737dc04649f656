#include "client/cpp/session.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"

namespace ballast {
namespace {

constexpr uint32_t kProtocol = 1;
// The digests take a pass over all weights on the daemon.
constexpr absl::Duration kAttachTimeout = absl::Seconds(120);
constexpr absl::Duration kServerTimeout = absl::Seconds(1);

v1::AttachRequest Request(const AttachOptions& options) {
  v1::AttachRequest request;
  request.set_run_id(options.run_id);
  request.set_rank(options.rank);
  request.set_world(options.world);
  request.set_protocol_min(kProtocol);
  request.set_protocol_max(kProtocol);
  request.set_client_version("ballast-cpp/" BALLAST_CLIENT_VERSION);
  return request;
}

// How long the lease of the session that holds the rank still runs; none when waiting does not help.
std::optional<absl::Duration> RetryAfter(const grpc::ClientContext& context) {
  const auto& metadata = context.GetServerTrailingMetadata();
  const auto found = metadata.find("ballast-retry-after-ms");
  int64_t ms = 0;
  if (found == metadata.end()) return std::nullopt;
  if (!absl::SimpleAtoi(absl::string_view(found->second.data(), found->second.size()), &ms)) return std::nullopt;
  if (ms <= 0) return std::nullopt;
  return absl::Milliseconds(ms);
}

absl::Status RankTaken(const AttachOptions& options, const grpc::Status& status) {
  return absl::AlreadyExistsError(
      absl::StrCat("rank ", options.rank, " of run '", options.run_id, "' is taken: ", status.error_message(),
                   ". If that trainer is gone for good, attach with takeover=true; else give another run_id"));
}

}  // namespace

absl::StatusOr<v1::AttachResponse> TakeRank(Connection& connection, const AttachOptions& options) {
  v1::AttachRequest request = Request(options);
  request.set_takeover(options.takeover);
  request.set_want_digests(true);
  const absl::Time give_up = absl::Now() + absl::Seconds(options.wait_s);
  for (bool waited = false;; waited = true) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kAttachTimeout));
    v1::AttachResponse response;
    const grpc::Status status = connection.trainer().Attach(&context, request, &response);
    if (status.ok()) return response;
    if (status.error_code() != grpc::StatusCode::ALREADY_EXISTS) return connection.Explain(status);
    const auto retry_after = RetryAfter(context);
    if (!retry_after || absl::Now() + *retry_after > give_up) return RankTaken(options, status);
    if (!waited) {
      connection.Log(
          absl::StrFormat("rank %d of run '%s' is held by a trainer that was lost; waiting %.1f s for its lease",
                          options.rank, options.run_id, absl::ToDoubleSeconds(*retry_after)));
    }
    absl::SleepFor(*retry_after);
  }
}

absl::StatusOr<v1::AttachResponse> ResumeSession(Connection& connection, const AttachOptions& options,
                                                 const std::string& token, grpc::ClientContext* context) {
  v1::AttachRequest request = Request(options);
  request.set_session_token(token);
  v1::AttachResponse response;
  if (auto s = FromGrpc(connection.trainer().Attach(context, request, &response)); !s.ok()) return s;
  return response;
}

absl::Status ExplainMissingRun(Connection& connection, const std::string& run_id, absl::Time since,
                               const absl::Status& found) {
  v1::GetServerResponse info;
  const absl::Status answer = connection.Call(connection.admin(), &v1::AdminService::Stub::GetServer,
                                              v1::GetServerRequest(), &info, kServerTimeout);
  const bool restarted = answer.ok() && absl::Seconds(info.uptime_s()) < absl::Now() - since;
  if (restarted) {
    return absl::NotFoundError(absl::StrCat("the daemon at ", connection.server(),
                                            " restarted and no longer holds run '", run_id,
                                            "' (this version keeps runs in memory only): create the run again "
                                            "and load the weights of your last checkpoint"));
  }
  return absl::NotFoundError(absl::StrCat("the daemon at ", connection.server(), " no longer holds run '", run_id,
                                          "', perhaps it was deleted: ", found.message()));
}

}  // namespace ballast
