// What all gRPC calls share: statuses in gRPC's words, and the count of calls. Thread-safe.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/retry_after.h"

#include "server/access/access_control.h"
#include "server/access/quotas.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/request_queue.h"
#include "server/base/utf8.h"
#include "server/metrics/metrics.h"
#include "server/nccl/nccl_offer.h"
#include "server/relay/relays.h"
#include "server/rpc/connection_table.h"
#include "server/run/run_registry.h"
#include "server/run/sessions.h"

namespace ballast {

// What the calls work on; all of it outlives them.
struct RpcEnvironment {
  const DevicePool* devices = nullptr;
  RunRegistry* runs = nullptr;
  Sessions* sessions = nullptr;
  Metrics* metrics = nullptr;
  const std::string* shm_socket = nullptr;  // path of the shared-memory socket; empty: there is none
  uint32_t message_bytes = 0;               // of one message of a stream, at most
  double open_timeout_s = 30;               // until a Train stream's first message must be there
  RequestQueue* requests = nullptr;
  ConnectionTable* connections = nullptr;
  RequestQueue* disk_requests = nullptr;  // of those that read the disk, which may hang
  RequestQueue* imports = nullptr;        // of those that read checkpoints whole, for minutes
  const AccessControl* access = nullptr;  // none: all may do everything
  Quotas* quotas = nullptr;
  Quota usual_quota = {};          // of who has no grant, where there is no access file
  const Relays* relays = nullptr;  // of a daemon that is a relay, and has no runs of its own
  NcclOffer* nccl = nullptr;
};

// Refuses a stream's message that is too long. gRPC has only one limit for all calls, which must admit a RunSpec.
inline absl::Status CheckMessageBytes(size_t bytes, const RpcEnvironment& environment) {
  if (bytes <= environment.message_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("a message of ", bytes, " bytes is larger than the daemon's limits.message_bytes, ",
                   environment.message_bytes, "; send chunks of the size that Attach answers"));
}

// Both libraries number the codes alike. Messages are cut to fit the 8 KiB of metadata that stock clients accept, in
// which a byte may take three.
inline grpc::Status ToGrpc(const absl::Status& status) {
  constexpr size_t kMostBytes = 2000;
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), ValidUtf8(std::string(status.message()), kMostBytes)};
}

// Counts one call in the metrics, from construction to Done, and logs it if it is refused, or to be audited. Call Done
// once.
class RpcRecord {
 public:
  RpcRecord(Metrics* metrics, std::string method, std::string peer)
      : metrics_(metrics), method_(std::move(method)), peer_(std::move(peer)), begin_s_(MonotonicSeconds()) {
    metrics_->OnRpcStarted(method_);
  }
  // Which run the call is about, as soon as that is known.
  void set_run_id(const std::string& run_id) { run_id_ = run_id.substr(0, kMostRunIdBytes); }
  // The grant by which the caller may make it.
  void set_grant(const std::string& grant) { grant_ = grant; }
  const std::string& grant() const { return grant_; }
  const std::string& peer() const { return peer_; }
  // It is an administrator's, of which the log tells also when it is done.
  void set_audited() { audited_ = true; }
  void Done(const absl::Status& status) {
    Count(status);
    if (status.ok() && audited_) {
      Log(LogLevel::kAudit, "audit", "an administrator's request was done",
          {{"run_id", run_id_}, {"peer", peer_}, {"method", method_}, {"grant", grant_}});
    }
    // Of what a quota refuses the log has lines of its own, so that one caller's do not keep others' out.
    if (status.ok() || absl::IsCancelled(status) || IsQuotaRefusal(status)) return;
    Log(LogLevel::kWarn, "refused", "a request was refused",
        {{"run_id", run_id_},
         {"reason", absl::StatusCodeToString(status.code())},
         {"peer", peer_},
         {"method", method_},
         {"grant", grant_},
         {"err", ValidUtf8(std::string(status.message()), kMostReasonBytes)}});
  }
  // As Done, without the log line, for calls of which the run logs more.
  void Count(const absl::Status& status) {
    metrics_->OnRpcHandled(method_, absl::StatusCodeToString(status.code()), MonotonicSeconds() - begin_s_);
  }

 private:
  static constexpr size_t kMostRunIdBytes = 128, kMostReasonBytes = 500;  // of a line
  Metrics* metrics_;
  std::string method_, peer_, run_id_, grant_;
  bool audited_ = false;
  double begin_s_;
};

// Tells the client when to ask again.
inline void RetryAfter(grpc::CallbackServerContext* context, int64_t ms) {
  context->AddTrailingMetadata(kRetryAfterKey, absl::StrCat(ms));
}
// The same, where the status says so.
inline void TellRetryAfter(grpc::CallbackServerContext* context, const absl::Status& status) {
  if (const std::optional<int64_t> ms = RetryAfterMsOf(status)) RetryAfter(context, *ms);
}

// The same; where it does not say so, and asking again later may help, in so many milliseconds.
inline void TellReaderWhen(grpc::CallbackServerContext* context, const absl::Status& status, int64_t ms) {
  const bool told = RetryAfterMsOf(status).has_value();
  if (!told && (absl::IsResourceExhausted(status) || absl::IsUnavailable(status))) RetryAfter(context, ms);
}

// A unary call that waits for its answer; call Finish once.
struct PendingCall {
  grpc::CallbackServerContext* context;
  grpc::ServerUnaryReactor* reactor;
  RpcRecord record;
  Caller caller = {};
  Payer payer = {};
  bool admitted = true;  // otherwise it is finished

  void Finish(const absl::Status& status) {
    record.Done(status);
    TellRetryAfter(context, status);
    reactor->Finish(ToGrpc(status));
  }
};

}  // namespace ballast
