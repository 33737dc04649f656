// Who may make which call: what each wants (server/access), and the door that every unary call comes in by. A stream
// comes in by CheckAccess, once it is known which run it is about. Without the configuration's key `access` all may do
// everything. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "server/access/access_list.h"
#include "server/rpc/rpc.h"

namespace ballast {

struct CallNeed {
  Scope scope;
  bool of_run;  // of the one that the call is about; otherwise any grant will do
};
// Of a method of either service, by its name; none: there is no such method.
std::optional<CallNeed> NeedOf(absl::string_view method);

// By the call's metadata, "authorization: Bearer TOKEN", and its connection's certificate.
Caller CallerOf(const grpc::CallbackServerContext& context);

// OK: the caller may make the call; its grant's name goes to the record, if any, and what an administrator may do is
// logged.
absl::Status CheckAccess(const RpcEnvironment& environment, const Caller& caller, absl::string_view method,
                         const std::string& run_id, RpcRecord* record);
// OK: the caller has some grant. What a stream asks before it looks at a message.
absl::Status CheckKnown(const RpcEnvironment& environment, const Caller& caller);
// Whether the caller may see that there is such a run.
bool MaySee(const RpcEnvironment& environment, const Caller& caller, const std::string& run_id);

// Begins a unary call about a run, or about the daemon, with an empty run_id; or refuses it, and it is finished.
PendingCall Admit(const RpcEnvironment& environment, grpc::CallbackServerContext* context, const std::string& method,
                  const std::string& run_id);

// Answers a call through the request queue. `answer` finishes the call, on the queue's thread or later. A call that is
// not admitted, or for which the queue has no place, is refused here.
template <typename Request>
grpc::ServerUnaryReactor* AnswerInTurn(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                                       const std::string& method, const std::string& run_id, const Request& request,
                                       absl::AnyInvocable<void(PendingCall, RequestQueue::Place)> answer) {
  PendingCall call = Admit(environment, context, method, run_id);
  if (!call.admitted) return call.reactor;
  const absl::Status taken = environment.requests->Post(
      request.ByteSizeLong(), [call, context, answer = std::move(answer)](RequestQueue::Place place) mutable {
        // Nobody waits for it any more; a daemon that shuts down cancels all.
        if (context->IsCancelled()) return call.Finish(absl::CancelledError("the call was cancelled while it waited"));
        answer(call, std::move(place));
      });
  if (taken.ok()) return call.reactor;
  RetryAfter(context, RequestQueue::kRetryAfterMs);
  call.Finish(taken);
  return call.reactor;
}

}  // namespace ballast
