// Follows one run of another daemon, for as long as this one serves, and has its versions in a RelayedRun for readers here.
// What fails there is tried again, with pauses that grow; meanwhile readers keep what there is, and newcomers are served
// it, but of a run that is known to be gone.
//
// Its thread waits for the upstream; all that others ask is answered at once. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/follow.pb.h"
#include "ballast/v1/run.pb.h"
#include "client/cpp/follow/incoming_version.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/retry.h"
#include "client/cpp/transport/scoped_call.h"
#include "client/cpp/wire/tensor_table.h"
#include "server/config/config.h"
#include "server/metrics/metrics.h"
#include "server/relay/relay_memory.h"
#include "server/relay/relay_path.h"
#include "server/relay/relayed_run.h"
#include "server/relay/version_assembly.h"

namespace ballast {

class Relay {
 public:
  struct Options {
    std::string run_id;
    Config::Relay relay;
    Config::Limits limits;
    Metrics* metrics;  // outlives it, like the next two
    RelayMemory* memory;
    RelayPath* path;
  };
  explicit Relay(Options options);
  ~Relay() { Stop(absl::UnavailableError("the relay is shutting down")); }

  const std::string& run_id() const { return options_.run_id; }
  // UNAVAILABLE: the upstream has not answered yet; else why the run cannot be served.
  absl::StatusOr<std::shared_ptr<RelayedRun>> Find() const;
  // The spec is the upstream's. Errors as of Find.
  absl::StatusOr<v1::GetRunResponse> GetRun() const;
  v1::RunStatus Status() const;
  double busy_s() const;
  // Readers end with this status.
  void Stop(const absl::Status& why);

 private:
  // Why nothing comes.
  struct Failure {
    absl::Status status = absl::OkStatus();
    const char* reason = "";  // as of ballast_relay_failures_total
    bool gone = false;        // there is nothing to serve any more
  };

  // --- the relay's thread ---
  void Loop();
  // Until the call has ended.
  Failure FollowOnce();
  absl::Status Connect();
  template <typename Request, typename Response>
  absl::Status Ask(grpc::Status (v1::AdminService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                   const Request& request, Response* response);
  // The run as the upstream has it is the one that is served here, from now on.
  Failure Adopt(const v1::GetRunResponse& answer);
  Failure Begin(const v1::GetRunResponse& answer, RunSpec spec);
  Failure Receive();
  v1::SubscribeRequest WhatToSend() const;
  absl::Status Take(const v1::VersionPart& part);
  absl::Status TakeBegin(const v1::VersionBegin& begin);
  absl::Status TakeEnd(const v1::VersionEnd& end);
  // Readers end with this status, and the memory is free.
  void Drop(const absl::Status& why);
  void Report(const Failure& failure);
  void Pause(const Failure& failure);
  void Show(bool connected);

  const Options options_;
  const std::unique_ptr<RelayMetrics> metrics_;
  absl::Notification stop_;

  mutable absl::Mutex mu_;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mu_) = nullptr;  // under way
  std::shared_ptr<RelayedRun> run_ ABSL_GUARDED_BY(mu_);      // written by the relay's thread; nullptr: why_none_
  absl::Status why_none_ ABSL_GUARDED_BY(mu_);
  v1::GetRunResponse answer_ ABSL_GUARDED_BY(mu_);  // the upstream's, of the run
  v1::RelayStatus status_ ABSL_GUARDED_BY(mu_);
  absl::Status end_ ABSL_GUARDED_BY(mu_);  // what readers are told when it stops

  // The thread's.
  std::unique_ptr<Connection> connection_;
  std::optional<Retry> retry_;  // of the connection
  std::shared_ptr<RelayedRun> served_;
  TensorTable tensors_;
  uint64_t whole_bytes_ = 0;                     // of a version
  std::shared_ptr<const WeightVersion> newest_;  // as it was published
  bool trusted_ = false;                         // the upstream may be asked for what has changed since
  bool progressed_ = false;                      // since the last failure
  bool refused_ = false;                         // by the upstream, since the last version: it may be again
  std::string reported_;                         // the failure that the log has been told of since
  std::optional<IncomingVersion> incoming_;
  std::optional<VersionAssembly> assembly_;
  absl::Time began_;  // the incoming one
  std::thread thread_;
};

}  // namespace ballast
