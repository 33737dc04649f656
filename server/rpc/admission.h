// Who may make which call: what each wants (server/access), and the door that every unary call comes in by. A stream
// comes in by CheckAccess, once it is known which run it is about. Without the configuration's key `access` all may do
// everything. Thread-safe.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/retry_after.h"

#include "server/access/access_list.h"
#include "server/rpc/request_memory.h"
#include "server/rpc/rpc.h"

namespace ballast {

struct CallNeed {
  Scope scope;
  bool of_run;           // of the one that the call is about; otherwise any grant will do
  bool relayed = false;  // a relay answers it, too
};
// Of a method of either service, by its name; none: there is no such method.
std::optional<CallNeed> NeedOf(absl::string_view method);

// Who calls: by the call's metadata, "authorization: Bearer TOKEN", its connection's certificate, and its address.
// RESOURCE_EXHAUSTED: too many calls from there have failed, and nothing of this one was looked at.
absl::StatusOr<Caller> Enter(const RpcEnvironment& environment, const grpc::CallbackServerContext& context,
                             absl::string_view method);

// The caller may make the call; whom it counts for. The grant's name goes to the record, if any, and what an
// administrator may do is logged. RESOURCE_EXHAUSTED: it makes too many.
absl::StatusOr<Payer> CheckAccess(const RpcEnvironment& environment, const Caller& caller, absl::string_view method,
                                  const std::string& run_id, RpcRecord* record);
// The same of a stream, which has its place from then on.
absl::StatusOr<StreamPlace> AdmitStream(const RpcEnvironment& environment, const Caller& caller,
                                        absl::string_view method, const std::string& run_id, RpcRecord* record);
// OK: the caller has some grant, and this is no relay. What a trainer's stream asks before it looks at a message.
absl::Status CheckKnown(const RpcEnvironment& environment, const Caller& caller);
// A call that was let in failed all the same: CreateRun's failures count.
void OnFailed(const RpcEnvironment& environment, const Caller& caller, const absl::Status& why);
// Whether the caller may see that there is such a run.
bool MaySee(const RpcEnvironment& environment, const Caller& caller, const std::string& run_id);

// Begins a unary call about a run, or about the daemon, with an empty run_id; or refuses it, and it is finished.
PendingCall Admit(const RpcEnvironment& environment, grpc::CallbackServerContext* context, const std::string& method,
                  const std::string& run_id);
// The same of a call that changes something: one of which this daemon does not know a field is refused, too, since it
// would do something else than was asked.
PendingCall AdmitChange(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                        const std::string& method, const std::string& run_id, const google::protobuf::Message& request);

// Answers a call through the request queue. `answer` finishes the call, on the queue's thread or later. A call that is
// not admitted, or for which the queue has no place, is refused here.
template <typename Request>
grpc::ServerUnaryReactor* AnswerInTurn(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                                       const std::string& method, const std::string& run_id, const Request& request,
                                       absl::AnyInvocable<void(PendingCall, RequestQueue::Place)> answer) {
  PendingCall call = Admit(environment, context, method, run_id);
  if (!call.admitted) return call.reactor;
  const absl::StatusOr<uint64_t> bytes = MemoryOf(request, RequestQueue::kMostBytes);
  if (!bytes.ok()) {
    call.Finish(bytes.status());
    return call.reactor;
  }
  const absl::Status taken = environment.requests->Post(
      *bytes, [call, context, answer = std::move(answer)](RequestQueue::Place place) mutable {
        // Nobody waits for it any more; a daemon that shuts down cancels all.
        if (context->IsCancelled()) return call.Finish(absl::CancelledError("the call was cancelled while it waited"));
        answer(call, std::move(place));
      });
  if (taken.ok()) return call.reactor;
  call.Finish(WithRetryAfter(taken, RequestQueue::kRetryAfterMs / 1000.0));
  return call.reactor;
}

}  // namespace ballast
