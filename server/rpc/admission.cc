#include "server/rpc/admission.h"

#include <algorithm>
#include <array>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "proto/tls/sha256.h"

#include "server/rpc/peer_identity.h"

namespace ballast {
namespace {

struct NamedNeed {
  absl::string_view method;
  CallNeed need;
};
constexpr auto kNeeds = std::to_array<NamedNeed>({
    {"GetServer", {Scope::kObserve, false}},
    {"ListRuns", {Scope::kObserve, false}},  // answers with the runs that the caller may see
    {"Plan", {Scope::kObserve, false}},      // reserves nothing
    {"GetRun", {Scope::kObserve, true}},
    {"GetHistory", {Scope::kObserve, true}},
    {"ListCheckpoints", {Scope::kObserve, true}},
    {"Pull", {Scope::kPull, true}},
    {"CreateRun", {Scope::kPush, true}},
    {"AmendRun", {Scope::kPush, true}},
    {"Attach", {Scope::kPush, true}},
    {"LoadState", {Scope::kPush, true}},
    {"Train", {Scope::kPush, true}},
    {"Checkpoint", {Scope::kPush, true}},
    {"DeleteRun", {Scope::kAdmin, true}},
    {"Rewind", {Scope::kAdmin, true}},
    {"Restore", {Scope::kAdmin, true}},
});

constexpr absl::string_view kScheme = "Bearer ";

}  // namespace

std::optional<CallNeed> NeedOf(absl::string_view method) {
  const auto* found =
      std::find_if(kNeeds.begin(), kNeeds.end(), [&](const NamedNeed& n) { return n.method == method; });
  return found == kNeeds.end() ? std::nullopt : std::optional(found->need);
}

Caller CallerOf(const grpc::CallbackServerContext& context) {
  Caller caller{.token_sha256 = "", .identity = PeerIdentity(context)};
  const auto found = context.client_metadata().find("authorization");
  if (found == context.client_metadata().end()) return caller;
  const absl::string_view brought(found->second.data(), found->second.size());
  if (absl::StartsWithIgnoreCase(brought, kScheme)) {
    const absl::string_view token = absl::StripAsciiWhitespace(brought.substr(kScheme.size()));
    if (!token.empty()) caller.token_sha256 = Sha256Hex(token);
  }
  return caller;
}

absl::Status CheckAccess(const RpcEnvironment& environment, const Caller& caller, absl::string_view method,
                         const std::string& run_id, RpcRecord* record) {
  const std::optional<CallNeed> need = NeedOf(method);
  if (!need) return absl::InternalError("the call is in no table of what calls want");
  if (environment.access != nullptr) {
    const auto run = need->of_run ? std::optional<absl::string_view>(run_id) : std::nullopt;
    const absl::StatusOr<std::string> grant = environment.access->Find(caller, need->scope, run);
    if (!grant.ok()) return grant.status();
    if (record != nullptr) record->set_grant(*grant);
  }
  if (need->scope == Scope::kAdmin && record != nullptr) record->set_audited();
  return absl::OkStatus();
}

absl::Status CheckKnown(const RpcEnvironment& environment, const Caller& caller) {
  if (environment.access == nullptr) return absl::OkStatus();
  return environment.access->Find(caller, Scope::kObserve, std::nullopt).status();
}

bool MaySee(const RpcEnvironment& environment, const Caller& caller, const std::string& run_id) {
  return environment.access == nullptr || environment.access->Find(caller, Scope::kObserve, run_id).ok();
}

PendingCall Admit(const RpcEnvironment& environment, grpc::CallbackServerContext* context, const std::string& method,
                  const std::string& run_id) {
  PendingCall call{context->DefaultReactor(), RpcRecord(environment.metrics, method, context->peer())};
  call.record.set_run_id(run_id);
  const absl::Status admitted = CheckAccess(environment, CallerOf(*context), method, run_id, &call.record);
  call.admitted = admitted.ok();
  if (!call.admitted) call.Finish(admitted);
  return call;
}

}  // namespace ballast
