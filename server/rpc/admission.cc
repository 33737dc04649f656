#include "server/rpc/admission.h"

#include <algorithm>
#include <array>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/known_fields.h"
#include "proto/tls/sha256.h"

#include "server/base/status_macros.h"
#include "server/rpc/peer_identity.h"

namespace ballast {
namespace {

struct NamedNeed {
  absl::string_view method;
  CallNeed need;
};
constexpr auto kNeeds = std::to_array<NamedNeed>({
    {"GetServer", {Scope::kObserve, false, true}},
    {"ListRuns", {Scope::kObserve, false, true}},  // answers with the runs that the caller may see
    {"Plan", {Scope::kObserve, false}},            // reserves nothing
    {"GetRun", {Scope::kObserve, true, true}},
    {"GetHistory", {Scope::kObserve, true}},
    {"ListCheckpoints", {Scope::kObserve, true}},
    {"Pull", {Scope::kPull, true}},
    {"Subscribe", {Scope::kPull, true, true}},
    {"ListVersions", {Scope::kPull, true}},
    {"CreateRun", {Scope::kPush, true}},
    {"AmendRun", {Scope::kPush, true}},
    {"Attach", {Scope::kPush, true}},
    {"LoadState", {Scope::kPush, true}},
    {"Train", {Scope::kPush, true}},
    {"Checkpoint", {Scope::kPush, true}},
    {"TagVersion", {Scope::kPush, true}},
    {"UntagVersion", {Scope::kPush, true}},
    {"DeleteRun", {Scope::kAdmin, true}},
    {"Rewind", {Scope::kAdmin, true}},
    {"Restore", {Scope::kAdmin, true}},
});

constexpr absl::string_view kScheme = "Bearer ", kCreate = "CreateRun";

// Where a caller comes from, as it cannot choose by itself; empty: a Unix socket, where all look the same, and whose
// file's rights say who may connect.
std::string Origin(const Caller& caller) {
  if (!caller.identity.empty()) return absl::StrCat("certificate ", caller.identity);
  return caller.address.empty() ? "" : absl::StrCat("address ", caller.address);
}

absl::Status Failed(const RpcEnvironment& environment, const Caller& caller, const absl::Status& why) {
  environment.quotas->OnFailure(Origin(caller), Quotas::Failing::kRight, why);
  return why;
}

}  // namespace

std::optional<CallNeed> NeedOf(absl::string_view method) {
  const auto* found =
      std::find_if(kNeeds.begin(), kNeeds.end(), [&](const NamedNeed& n) { return n.method == method; });
  return found == kNeeds.end() ? std::nullopt : std::optional(found->need);
}

absl::StatusOr<Caller> Enter(const RpcEnvironment& environment, const grpc::CallbackServerContext& context,
                             absl::string_view method) {
  Caller caller{.token_sha256 = "", .identity = PeerIdentity(context), .address = PeerAddress(context.peer())};
  const std::string who = Origin(caller);
  RETURN_IF_ERROR(environment.quotas->CheckFailures(who, Quotas::Failing::kRight));
  if (method == kCreate) RETURN_IF_ERROR(environment.quotas->CheckFailures(who, Quotas::Failing::kCreate));
  const auto found = context.client_metadata().find("authorization");
  if (found == context.client_metadata().end()) return caller;
  const absl::string_view brought(found->second.data(), found->second.size());
  if (absl::StartsWithIgnoreCase(brought, kScheme)) {
    const absl::string_view token = absl::StripAsciiWhitespace(brought.substr(kScheme.size()));
    if (!token.empty()) caller.token_sha256 = Sha256Hex(token);
  }
  return caller;
}

absl::StatusOr<Payer> CheckAccess(const RpcEnvironment& environment, const Caller& caller, absl::string_view method,
                                  const std::string& run_id, RpcRecord* record) {
  const std::optional<CallNeed> need = NeedOf(method);
  if (!need) return absl::InternalError("the call is in no table of what calls want");
  Payer payer{.name = Origin(caller), .quota = environment.usual_quota};
  if (environment.access != nullptr) {
    const auto run = need->of_run ? std::optional<absl::string_view>(run_id) : std::nullopt;
    auto grant = environment.access->Find(caller, need->scope, run);
    if (!grant.ok()) return Failed(environment, caller, grant.status());
    payer = {.name = absl::StrCat("grant ", (*grant)->name), .quota = (*grant)->quota, .grant = *grant};
    if (record != nullptr) record->set_grant((*grant)->name);
  }
  if (environment.relays != nullptr && !need->relayed) return environment.relays->Refusal();
  RETURN_IF_ERROR(environment.quotas->Begin(payer));
  if (need->scope == Scope::kAdmin && record != nullptr) record->set_audited();
  return payer;
}

absl::StatusOr<StreamPlace> AdmitStream(const RpcEnvironment& environment, const Caller& caller,
                                        absl::string_view method, const std::string& run_id, RpcRecord* record) {
  ASSIGN_OR_RETURN(const Payer payer, CheckAccess(environment, caller, method, run_id, record));
  return environment.quotas->OpenStream(payer);
}

absl::Status CheckKnown(const RpcEnvironment& environment, const Caller& caller) {
  if (environment.access != nullptr) {
    const absl::Status known = environment.access->Find(caller, Scope::kObserve, std::nullopt).status();
    if (!known.ok()) return Failed(environment, caller, known);
  }
  return environment.relays == nullptr ? absl::OkStatus() : environment.relays->Refusal();
}

void OnFailed(const RpcEnvironment& environment, const Caller& caller, const absl::Status& why) {
  // What waiting helps with, or a client that has left, is no fault of the caller's.
  if (why.ok() || absl::IsCancelled(why) || absl::IsUnavailable(why) || RetryAfterMsOf(why)) return;
  environment.quotas->OnFailure(Origin(caller), Quotas::Failing::kCreate, why);
}

bool MaySee(const RpcEnvironment& environment, const Caller& caller, const std::string& run_id) {
  return environment.access == nullptr || environment.access->Find(caller, Scope::kObserve, run_id).ok();
}

PendingCall Admit(const RpcEnvironment& environment, grpc::CallbackServerContext* context, const std::string& method,
                  const std::string& run_id) {
  PendingCall call{context, context->DefaultReactor(), RpcRecord(environment.metrics, method, context->peer())};
  call.record.set_run_id(run_id);
  const absl::Status admitted = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(call.caller, Enter(environment, *context, method));
    ASSIGN_OR_RETURN(call.payer, CheckAccess(environment, call.caller, method, run_id, &call.record));
    return absl::OkStatus();
  }();
  call.admitted = admitted.ok();
  if (!call.admitted) call.Finish(admitted);
  return call;
}

PendingCall AdmitChange(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                        const std::string& method, const std::string& run_id,
                        const google::protobuf::Message& request) {
  PendingCall call = Admit(environment, context, method, run_id);
  if (!call.admitted) return call;
  const absl::Status known = CheckKnownFields(request);
  call.admitted = known.ok();
  if (!call.admitted) call.Finish(known);
  return call;
}

}  // namespace ballast
