#include "client/cpp/stream/goodbye.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>

#include "proto/rewound.h"

#include "client/cpp/stream/session.h"
#include "client/cpp/transport/retry.h"

namespace ballast {
namespace {

absl::StatusOr<v1::AttachResponse> AttachBy(Connection& connection, const AttachOptions& options,
                                            const std::string& token, absl::Time give_up) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineAt(give_up));
  return ResumeSession(connection, options, token, /*want_digests=*/false, &context);
}

// Whether the session is over, and nobody else has taken its rank by that.
bool EndedWithoutHeir(const absl::Status& status) { return RewoundTo(status) || absl::IsNotFound(status); }

absl::Status OpenAndEnd(Connection& connection, const std::string& token, absl::Time give_up) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineAt(give_up));
  const auto stream = connection.trainer().Train(&context);
  v1::TrainRequest request;
  request.mutable_open()->set_session_token(token);
  if (stream->Write(request)) stream->WritesDone();
  v1::TrainResponse response;
  while (stream->Read(&response)) continue;
  return FromGrpc(stream->Finish(), context);
}

absl::StatusOr<uint64_t> TryOnce(Connection& connection, const AttachOptions& options, const std::string& token,
                                 absl::Time give_up) {
  auto grant = AttachBy(connection, options, token, give_up);
  if (!grant.ok() && EndedWithoutHeir(grant.status())) grant = AttachBy(connection, options, "", give_up);
  if (!grant.ok()) return grant.status();
  if (auto s = OpenAndEnd(connection, grant->session_token(), give_up); !s.ok()) return s;
  return grant->resume_step() - 1;
}

}  // namespace

absl::StatusOr<uint64_t> GiveRankBack(Connection& connection, const AttachOptions& given, const std::string& token,
                                      absl::Duration timeout) {
  AttachOptions options = given;
  options.takeover = false;
  options.from_step = options.again_step = 0;  // it makes none
  const absl::Time give_up = SteadyNow() + timeout;
  for (int attempt = 1;; ++attempt) {
    auto step = TryOnce(connection, options, token, give_up);
    const auto stated = RetryAfter(step.status());
    const bool may_pass = IsLost(step.status()) || stated || RewoundTo(step.status());
    const absl::Duration pause = std::max(Backoff(attempt), stated.value_or(absl::ZeroDuration()));
    if (step.ok() || !may_pass || SteadyNow() + pause >= give_up) return step;
    connection.WaitConnecting(pause);
  }
}

}  // namespace ballast
