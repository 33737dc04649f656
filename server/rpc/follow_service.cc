#include "server/rpc/follow_service.h"

#include <utility>

#include "server/base/log.h"
#include "server/convert/convert.h"
#include "server/rpc/admission.h"

namespace ballast {
namespace {

// What the log keeps of who named what.
void Audit(const char* message, const std::string& run_id, const std::string& tag, const PendingCall& call,
           const std::string& step) {
  Log(LogLevel::kAudit, "audit", message,
      {{"run_id", run_id},
       {"tag", tag},
       {"step", step},
       {"peer", call.context->peer()},
       {"grant", call.record.grant()}});
}

}  // namespace

grpc::ServerUnaryReactor* FollowService::TagVersion(grpc::CallbackServerContext* context,
                                                    const v1::TagVersionRequest* request,
                                                    v1::TagVersionResponse* response) {
  PendingCall call = AdmitChange(environment_, context, "TagVersion", request->run_id(), *request);
  if (!call.admitted) return call.reactor;
  const auto run = environment_.runs->Find(request->run_id());
  auto order = ToTagOrder(*request);
  if (const absl::Status s = run.ok() ? order.status() : run.status(); !s.ok()) {
    call.Finish(s);
    return call.reactor;
  }
  (*run)->TagVersion(*std::move(order), [call, request, response](const auto& tagged) mutable {
    if (tagged.ok()) {
      *response->mutable_tag() = FromTag(tagged->tag);
      response->set_created(tagged->created);
      if (tagged->created) {
        Audit("a version of the run's weights has a name", request->run_id(), request->name(), call,
              absl::StrCat(tagged->tag.id.step));
      }
    }
    call.Finish(tagged.status());
  });
  return call.reactor;
}

grpc::ServerUnaryReactor* FollowService::UntagVersion(grpc::CallbackServerContext* context,
                                                      const v1::UntagVersionRequest* request,
                                                      v1::UntagVersionResponse*) {
  PendingCall call = AdmitChange(environment_, context, "UntagVersion", request->run_id(), *request);
  if (!call.admitted) return call.reactor;
  const auto run = environment_.runs->Find(request->run_id());
  if (!run.ok()) {
    call.Finish(run.status());
    return call.reactor;
  }
  (*run)->UntagVersion(request->name(), [call, request](const absl::Status& gone) mutable {
    if (gone.ok()) Audit("a version's name was taken away", request->run_id(), request->name(), call, "");
    call.Finish(gone);
  });
  return call.reactor;
}

grpc::ServerUnaryReactor* FollowService::ListVersions(grpc::CallbackServerContext* context,
                                                      const v1::ListVersionsRequest* request,
                                                      v1::ListVersionsResponse* response) {
  PendingCall call = Admit(environment_, context, "ListVersions", request->run_id());
  if (!call.admitted) return call.reactor;
  const auto run = environment_.runs->Find(request->run_id());
  if (!run.ok()) {
    call.Finish(run.status());
    return call.reactor;
  }
  const auto series = ToSeries(*request, (*run)->spec());
  if (!series.ok()) {
    call.Finish(series.status());
    return call.reactor;
  }
  (*run)->ListVersions(*series, [call, response](const auto& list) mutable {
    if (list.ok()) *response = FromVersions(*list);
    call.Finish(list.status());
  });
  return call.reactor;
}

}  // namespace ballast
