// A rank's session with the daemon: asking for it, and asking for it again. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/connection.h"

namespace ballast {

// What a rank that holds these shards contributes to and receives, as the wire says it.
google::protobuf::RepeatedPtrField<v1::TensorCoverage> CoverageOf(const Shards& shards);

// Takes the rank. Waits up to options.wait_s while a lost predecessor's lease holds it, before that as long, but at most 10 s,
// while the daemon takes the predecessor for alive, and up to
// options.join_timeout_s while a step is open without it. Tries again while the connection is lost or the daemon is
// busy, as Retry says. ALREADY_EXISTS says how to take over.
// `own`: the caller's own last stream held the rank.
absl::StatusOr<v1::AttachResponse> TakeRank(Connection& connection, const AttachOptions& options, bool own = false);

// One attempt to get the session of `token` back. `context` is the caller's, with its deadline, so that it
// can be cancelled.
absl::StatusOr<v1::AttachResponse> ResumeSession(Connection& connection, const AttachOptions& options,
                                                 const std::string& token, bool want_digests,
                                                 grpc::ClientContext* context);

// Says that the process lives to a daemon that takes keepalives, and that has ended the session of `token` by a rewind. An
// error: as of ResumeSession; one that may not pass says that this need not be said again.
absl::Status KeepAlive(Connection& connection, const AttachOptions& options, const std::string& token,
                       grpc::ClientContext* context);

// Whether the daemon that answers now started after `since`, of BootNow(). An error, as IsLost knows them: none does.
absl::StatusOr<bool> RestartedSince(Connection& connection, absl::Time since);
// What a trainer is told then: where the daemon has read the run back from its disk, that it was rewound
// (proto/rewound.h); else NOT_FOUND, and what to do. Of a daemon that is gone again nothing can be told: as IsLost knows.
absl::Status RunAfterRestart(Connection& connection, const std::string& run_id);

// What NOT_FOUND means to a client whose session began at `since`: the daemon started again, or the run was deleted; or,
// where the daemon is gone again before it can be asked, as IsLost knows: ask again.
absl::Status ExplainMissingRun(Connection& connection, const std::string& run_id, absl::Time since,
                               const absl::Status& found);

// What the daemon's answer says to the caller.
Attachment AttachmentOf(const v1::AttachResponse& grant);

}  // namespace ballast
