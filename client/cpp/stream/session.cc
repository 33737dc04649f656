#include "client/cpp/stream/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/nccl/nccl.h"
#include "proto/protocol_version.h"
#include "proto/rewound.h"
#include "proto/utf8.h"

#include "client/cpp/transport/retry.h"

namespace ballast {
namespace {

// The digests take a pass over all weights on the daemon.
constexpr absl::Duration kAttachTimeout = absl::Seconds(120);
// Of a daemon that has just answered, and may be busy.
constexpr absl::Duration kServerTimeout = absl::Seconds(10);
// How long the daemon may take a session for alive whose process has ended: its pings notice within 8 s that a machine is
// gone, or that of a killed process only forks are left, which keep its socket open. And how often it is asked meanwhile.
constexpr absl::Duration kUnheard = absl::Seconds(10), kFirstGlance = absl::Milliseconds(10),
                         kLongestGlance = absl::Seconds(1);

// Who asks.
v1::AttachRequest OfRank(const AttachOptions& options) {
  v1::AttachRequest request;
  request.set_run_id(options.run_id);
  request.set_rank(options.rank);
  request.set_world(options.world);
  request.set_protocol_min(kProtocolMin);
  request.set_protocol_max(kProtocolMax);
  return request;
}

v1::AttachRequest Request(const AttachOptions& options) {
  v1::AttachRequest request = OfRank(options);
  request.add_features("held_whole");
  request.set_client_version("ballast-cpp/" BALLAST_CLIENT_VERSION);
  *request.mutable_coverage() = CoverageOf(options.shards);
  request.set_from_step(options.from_step);
  request.set_again_step(options.again_step);
  if (options.transport != TransportChoice::kNccl) return request;
  if (const auto nccl = Nccl::Load(); nccl.ok()) request.set_nccl_version((*nccl)->version());
  return request;
}

absl::Status RankTaken(const AttachOptions& options, const absl::Status& status) {
  return absl::AlreadyExistsError(
      absl::StrCat("rank ", options.rank, " of run '", options.run_id, "' is taken: ", status.message(),
                   ". If that trainer is gone for good, attach with takeover=true; else give another run_id"));
}

// Whether the daemon takes a session for alive; one whose connection was lost has a lease, whose end it tells.
bool Live(const absl::Status& status) { return absl::IsAlreadyExists(status) && !RetryAfter(status); }

// The waits for a daemon to hear that the process has ended whose session it takes for alive.
class UnheardEnd {
 public:
  UnheardEnd(Connection& connection, const AttachOptions& options, bool own)
      : connection_(connection), ends_(SteadyNow() + std::min(kUnheard, absl::Seconds(options.wait_s))), told_(own) {}

  // Waits, and returns true when it is to be asked again.
  bool Again(const absl::Status& held) {
    if (SteadyNow() >= ends_) return false;
    if (!std::exchange(told_, true)) {
      connection_.Log(
          absl::StrFormat("%s; waiting up to %.3g s, in case its process has ended and the daemon has yet to notice",
                          held.message(), absl::ToDoubleSeconds(ends_ - SteadyNow())));
    }
    return connection_.Sleep(std::exchange(glance_, std::min(2 * glance_, kLongestGlance)));
  }

 private:
  Connection& connection_;
  const absl::Time ends_;
  absl::Duration glance_ = kFirstGlance;
  bool told_;  // to people; of an end of the caller's own nothing is said
};

absl::Status StepTooLong(const AttachOptions& options, const absl::Status& status) {
  return absl::UnavailableError(absl::StrCat(
      "attaching as rank ", options.rank, " of run '", options.run_id, "': ", status.message(),
      "; it was not over within ", options.join_timeout_s, " s: see what its ranks wait for, or raise join_timeout_s"));
}

// Whether the daemon told. One that is older than the question told that it has nothing; one that refuses told nothing.
bool Told(const absl::Status& answer) { return answer.ok() || absl::IsUnimplemented(answer); }

// The run, where the daemon has it from its disk.
absl::StatusOr<std::optional<v1::RunStatus>> ReadBack(Connection& connection, const std::string& run_id) {
  v1::ListRunsResponse runs;
  const absl::Status answer = connection.Call(connection.admin(), &v1::AdminService::Stub::ListRuns,
                                              v1::ListRunsRequest(), &runs, kServerTimeout);
  if (!Told(answer)) return answer;
  for (const v1::RunStatus& run : runs.runs()) {
    if (run.run_id() == run_id && !run.durability().restored().empty()) return run;
  }
  return std::nullopt;
}

}  // namespace

google::protobuf::RepeatedPtrField<v1::TensorCoverage> CoverageOf(const Shards& shards) {
  google::protobuf::RepeatedPtrField<v1::TensorCoverage> coverage;
  for (uint32_t i = 0; i < shards.size(); ++i) {
    if (!shards[i]) continue;
    v1::TensorCoverage* covered = coverage.Add();
    covered->set_tensor(i);
    if (shards[i]->begin == shards[i]->end) continue;
    v1::ElementRange range;
    range.set_begin(shards[i]->begin);
    range.set_end(shards[i]->end);
    if (shards[i]->contributes) *covered->add_contributes() = range;
    *covered->add_receives() = range;
  }
  return coverage;
}

absl::StatusOr<v1::AttachResponse> TakeRank(Connection& connection, const AttachOptions& options, bool own) {
  v1::AttachRequest request = Request(options);
  request.set_spec_sha256(options.spec_sha256);
  request.set_takeover(options.takeover);
  request.set_want_digests(true);
  if (auto s = CheckText(request); !s.ok()) return s;
  Retry retry(connection, absl::StrCat("attaching as rank ", options.rank, " of run '", options.run_id, "'"),
              {.lease = absl::Seconds(options.wait_s), .step = absl::Seconds(options.join_timeout_s)});
  UnheardEnd unheard(connection, options, own);
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kAttachTimeout));
    v1::AttachResponse response;
    const absl::Status status = FromGrpc(connection.trainer().Attach(&context, request, &response), context);
    if (status.ok()) return response;
    if (!options.awaits_step && absl::IsUnavailable(status) && RetryAfter(status)) return status;
    if (retry.Again(status)) continue;
    if (Live(status) && unheard.Again(status)) {
      retry.LeaseBegins();
      continue;
    }
    if (absl::IsAlreadyExists(status)) return RankTaken(options, status);
    const bool waited = absl::IsUnavailable(status) && RetryAfter(status) && !retry.interrupted();
    return waited ? StepTooLong(options, status) : retry.Explain(status);
  }
}

absl::StatusOr<v1::AttachResponse> ResumeSession(Connection& connection, const AttachOptions& options,
                                                 const std::string& token, bool want_digests,
                                                 grpc::ClientContext* context) {
  v1::AttachRequest request = Request(options);
  request.set_session_token(token);
  request.set_want_digests(want_digests);
  v1::AttachResponse response;
  if (auto s = FromGrpc(connection.trainer().Attach(context, request, &response), *context); !s.ok()) return s;
  return response;
}

absl::Status KeepAlive(Connection& connection, const AttachOptions& options, const std::string& token,
                       grpc::ClientContext* context) {
  v1::AttachRequest request = OfRank(options);
  request.set_session_token(token);
  request.set_keepalive(true);
  v1::AttachResponse response;
  return FromGrpc(connection.trainer().Attach(context, request, &response), *context);
}

absl::StatusOr<bool> RestartedSince(Connection& connection, absl::Time since) {
  v1::GetServerResponse info;
  const absl::Status answer = connection.Call(connection.admin(), &v1::AdminService::Stub::GetServer,
                                              v1::GetServerRequest(), &info, kServerTimeout);
  if (!Told(answer)) return answer;
  return answer.ok() && absl::Seconds(info.uptime_s()) < BootNow() - since;
}

absl::Status RunAfterRestart(Connection& connection, const std::string& run_id) {
  const auto run = ReadBack(connection, run_id);
  if (!run.ok()) return run.status();
  if (*run) {
    return RewoundError((*run)->step(), (*run)->generation(),
                        absl::StrCat("the daemon at ", connection.server(), " restarted and read run '", run_id,
                                     "' back from its disk as it was then; "));
  }
  return absl::NotFoundError(absl::StrCat("the daemon at ", connection.server(), " restarted and no longer holds run '",
                                          run_id,
                                          "' (it keeps runs in memory until their first checkpoint, and without "
                                          "storage.dir in memory only): its weights and "
                                          "moments are gone there. Create the run again and load the weights of your "
                                          "last checkpoint: start every trainer of the run anew from it"));
}

absl::Status ExplainMissingRun(Connection& connection, const std::string& run_id, absl::Time since,
                               const absl::Status& found) {
  const absl::StatusOr<bool> restarted = RestartedSince(connection, since);
  if (!restarted.ok()) return restarted.status();
  if (*restarted) return RunAfterRestart(connection, run_id);
  return absl::NotFoundError(absl::StrCat("the daemon at ", connection.server(), " no longer holds run '", run_id,
                                          "', perhaps it was deleted: ", found.message()));
}

Attachment AttachmentOf(const v1::AttachResponse& grant) {
  Attachment attachment;
  attachment.resume_step = grant.resume_step();
  attachment.weights_loaded = grant.weights_loaded();
  attachment.digests.assign(grant.digests().begin(), grant.digests().end());
  if (grant.has_last_result()) attachment.last_result = grant.last_result();
  attachment.client_state = grant.client_state();
  attachment.client_state_step = grant.client_state_step();
  attachment.generation = grant.generation();
  return attachment;
}

}  // namespace ballast
