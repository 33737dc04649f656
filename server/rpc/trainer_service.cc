#include "server/rpc/trainer_service.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/protocol_version.h"
#include "proto/tls/sha256.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/convert/amendment.h"
#include "server/convert/canonical_spec.h"
#include "server/convert/convert.h"
#include "server/convert/create_request.h"
#include "server/rpc/admission.h"
#include "server/rpc/load_stream.h"
#include "server/rpc/peer_identity.h"
#include "server/rpc/pull_stream.h"
#include "server/rpc/request_memory.h"
#include "server/rpc/train_stream.h"
#include "server/rpc/version_pull_stream.h"

namespace ballast {
namespace {

absl::StatusOr<RunRegistry::AmendRequest> ToAmendRequest(const v1::AmendRunRequest& request, const Sessions& sessions,
                                                         const Config::Limits& limits, bool has_storage) {
  const auto session = sessions.Find(request.session_token());
  if (!session) return absl::NotFoundError("no session has this token; Attach first");
  if (session->run_id != request.spec().run_id()) {
    return absl::InvalidArgumentError(absl::StrCat("the session is of run '", session->run_id,
                                                   "', and spec.run_id is another; a run keeps its name"));
  }
  RunRegistry::AmendRequest made{.session = session->id};
  ASSIGN_OR_RETURN(made.spec, ToRunSpec(request.spec(), limits, has_storage));
  const v1::RunSpec asked = Canonical(request.spec(), has_storage);
  made.canonical_spec = SerializeCanonical(asked);
  made.spec_sha256 = Sha256Hex(made.canonical_spec);
  made.check = [asked](const std::string& canonical) -> absl::Status {
    v1::RunSpec existing;
    if (!existing.ParseFromString(canonical)) return absl::InternalError("the run's spec cannot be read");
    return CheckAmendment(existing, asked);
  };
  return made;
}

// That the client goes by this very spec.
absl::Status CheckSpec(const v1::AttachRequest& request, const Run& run) {
  if (request.spec_sha256().empty() || request.spec_sha256() == run.spec_sha256()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the spec of run '", request.run_id(),
                   "' is not the one that this client goes by: the run was amended "
                   "(AmendRun), or made anew. Give CreateRun the spec that it has now, which GetRun answers"));
}

absl::Status CheckRank(const v1::AttachRequest& request, const RunSpec& spec) {
  if (request.world() < 1 || request.world() > spec.ranks) {
    return absl::InvalidArgumentError(absl::StrCat("world is ", request.world(), "; the run was created for 1 to ",
                                                   spec.ranks, " ranks (RunSpec.ranks)"));
  }
  if (request.rank() >= request.world()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank is ", request.rank(), " of world ", request.world(), "; ranks count from 0"));
  }
  return absl::OkStatus();
}

// The socket is offered to all clients; each finds out whether it is on the same host.
void OfferSharedMemory(const RpcEnvironment& environment, v1::AttachResponse* response) {
  if (environment.shm_socket->empty()) return;
  response->add_lanes("shm");
  response->set_shm_socket(*environment.shm_socket);
}

void OfferNccl(const RpcEnvironment& environment, const v1::AttachRequest& request, const Run& run,
               v1::AttachResponse* response) {
  if (request.nccl_version() == 0) return;
  const absl::Status offered = environment.nccl->Check(request.nccl_version(), run);
  offered.ok() ? response->add_lanes("nccl") : response->set_why_no_nccl(std::string(offered.message()));
}

bool Knows(const v1::AttachRequest& request, const char* feature) {
  return std::find(request.features().begin(), request.features().end(), feature) != request.features().end();
}

absl::Status CheckProtocol(const v1::AttachRequest& request) {
  if (request.protocol_min() <= kProtocolMax && request.protocol_max() >= kProtocolMin) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the client speaks protocols ", request.protocol_min(), " to ", request.protocol_max(), ", this daemon ",
      kProtocolMin, " to ", kProtocolMax, "; install a client and a daemon of neighbouring versions"));
}

}  // namespace

grpc::ServerUnaryReactor* TrainerService::CreateRun(grpc::CallbackServerContext* context,
                                                    const v1::CreateRunRequest* request,
                                                    v1::CreateRunResponse* response) {
  return AnswerInTurn(environment_, context, "CreateRun", request->spec().run_id(), *request,
                      [=, this](PendingCall call, const RequestQueue::Place& place) {
                        Create(request->spec(), call, place, response);
                      });
}

void TrainerService::Create(const v1::RunSpec& spec, PendingCall call, RequestQueue::Place place,
                            v1::CreateRunResponse* response) {
  auto made = ToCreateRequest(spec, limits_, environment_.runs->has_storage());
  if (!made.ok()) {
    OnFailed(environment_, call.caller, made.status());
    return call.Finish(made.status());
  }
  made->payer = call.payer;
  environment_.runs->Create(*std::move(made), [=, this, place = std::move(place)](auto created) mutable {
    OnFailed(environment_, call.caller, created.status());
    if (created.ok()) {
      const Run& run = *created->run;
      response->set_created(created->created);
      *response->mutable_plan() = FromPlan(run.plan(), run.devices(), environment_.devices->free_bytes());
      response->set_spec_sha256(run.spec_sha256());
    }
    call.Finish(created.status());
  });
}

grpc::ServerUnaryReactor* TrainerService::AmendRun(grpc::CallbackServerContext* context,
                                                   const v1::AmendRunRequest* request, v1::AmendRunResponse* response) {
  return AnswerInTurn(environment_, context, "AmendRun", request->spec().run_id(), *request,
                      [=, this](PendingCall call, const RequestQueue::Place& place) {
                        Amend(*request, {.context = context, .call = call, .place = place, .response = response});
                      });
}

void TrainerService::Amend(const v1::AmendRunRequest& request, PendingAmend pending) {
  auto made = ToAmendRequest(request, *environment_.sessions, limits_, environment_.runs->has_storage());
  if (!made.ok()) return pending.call.Finish(made.status());
  made->payer = pending.call.payer;
  made->abandoned = [context = pending.context] { return context->IsCancelled(); };
  environment_.runs->Amend(*std::move(made), [this, pending = std::move(pending)](auto amended) mutable {
    if (amended.ok()) {
      const Run& run = *amended->run;
      v1::AmendRunResponse* const response = pending.response;
      response->set_amended(amended->amended);
      *response->mutable_plan() = FromPlan(run.plan(), run.devices(), environment_.devices->free_bytes());
      response->set_spec_sha256(run.spec_sha256());
      response->set_tensors_added(amended->tensors_added);
      response->set_step(amended->taken.step);
      response->set_generation(amended->taken.generation);
      const auto& dropped = amended->taken.snapshots_dropped;
      response->mutable_snapshots_dropped()->Add(dropped.begin(), dropped.end());
    }
    pending.call.Finish(amended.status());
  });
}

absl::StatusOr<std::shared_ptr<Run>> TrainerService::CheckAttach(const v1::AttachRequest& request,
                                                                 Run::AttachRequest* made) {
  RETURN_IF_ERROR(CheckProtocol(request));
  ASSIGN_OR_RETURN(auto run, environment_.runs->Find(request.run_id()));
  if (request.session_token().empty()) RETURN_IF_ERROR(CheckSpec(request, *run));
  RETURN_IF_ERROR(CheckRank(request, run->spec()));
  RETURN_IF_ERROR(CheckRequestMemory(request, run->spec().tensors.size(), run->chunk_starts()->back()));
  if (environment_.runs->draining())
    return absl::UnavailableError("the daemon is shutting down; attach to the next one");
  ASSIGN_OR_RETURN(made->coverage, ToCoverage(request, run->spec(), run->chunk_starts()));
  if (request.session_token().empty()) return run;
  const auto session = environment_.sessions->Find(request.session_token());
  if (!session || session->run_id != request.run_id()) {
    return absl::NotFoundError(
        absl::StrCat("no session of run '", request.run_id(), "' has this token; attach without a token to begin one"));
  }
  if (session->rank != request.rank()) {
    return absl::FailedPreconditionError(absl::StrCat("the token is of rank ", session->rank, ", and the request says ",
                                                      "rank ", request.rank(), "; each rank resumes its own session"));
  }
  made->resumes = session->id;
  return run;
}

grpc::ServerUnaryReactor* TrainerService::KeepAlive(const v1::AttachRequest& request, PendingCall call) {
  Run::AttachRequest made;
  auto run = CheckAttach(request, &made);
  if (run.ok() && !made.resumes) {
    run = absl::InvalidArgumentError("keepalive without session_token: it is of the session that a rewind has ended");
  }
  grpc::ServerUnaryReactor* const reactor = call.reactor;
  if (!run.ok()) {
    call.Finish(run.status());
    return reactor;
  }
  (*run)->KeepAlive(*made.resumes, [call, run = *run](const absl::Status& heard) mutable { call.Finish(heard); });
  return reactor;
}

grpc::ServerUnaryReactor* TrainerService::Attach(grpc::CallbackServerContext* context, const v1::AttachRequest* request,
                                                 v1::AttachResponse* response) {
  PendingCall call = Admit(environment_, context, "Attach", request->run_id());
  if (!call.admitted) return call.reactor;
  if (request->keepalive()) return KeepAlive(*request, std::move(call));
  Run::AttachRequest made{.fresh = environment_.sessions->NewId(),
                          .rank = request->rank(),
                          .world = request->world(),
                          .from_step = request->from_step(),
                          .again_step = request->again_step(),
                          .takeover = request->takeover(),
                          .want_digests = request->want_digests(),
                          .knows_whole = Knows(*request, "held_whole"),
                          .peer = context->peer(),
                          .accepted = [this, peer = context->peer()] { environment_.connections->Trust(peer); }};
  auto run = CheckAttach(*request, &made);
  if (!run.ok()) {
    call.Finish(run.status());
    return call.reactor;
  }
  (*run)->Attach(std::move(made), [=, this, run = *run](absl::StatusOr<Run::AttachReply> reply,
                                                        double retry_after_s) mutable {
    if (reply.ok()) {
      *response = FromAttachReply(*reply, run->spec());
      OfferSharedMemory(environment_, response);
      OfferNccl(environment_, *request, *run, response);
      response->set_protocol(kProtocolMax);
      response->set_takes_load_batches(true);
      response->set_takes_keepalives(true);
      const Sessions::Session session{
          .run_id = run->spec().run_id, .id = reply->session, .rank = request->rank(), .caller = call.caller};
      if (reply->resumed) environment_.sessions->Resume(request->session_token(), session.caller);
      response->set_session_token(reply->resumed ? request->session_token() : environment_.sessions->Issue(session));
      Log(LogLevel::kInfo, "attached", "rank attached",
          {{"run_id", run->spec().run_id},
           {"rank", uint64_t{request->rank()}},
           {"step", reply->resume_step},
           {"peer", context->peer()},
           {"identity", PeerIdentity(*context)},
           {"grant", call.record.grant()}});
    } else if (retry_after_s > 0) {
      RetryAfter(context, static_cast<int64_t>(std::ceil(retry_after_s * 1000)));
    }
    call.Finish(reply.status());
  });
  return call.reactor;
}

grpc::ServerReadReactor<v1::LoadStateRequest>* TrainerService::LoadState(grpc::CallbackServerContext* context,
                                                                         v1::LoadStateResponse* response) {
  return LoadStream::Start(environment_, response, context->peer(), Enter(environment_, *context, "LoadState"),
                           context);
}

grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>* TrainerService::Train(
    grpc::CallbackServerContext* context) {
  return TrainStream::Start(environment_, context);
}

grpc::ServerWriteReactor<v1::Weights>* TrainerService::Pull(grpc::CallbackServerContext* context,
                                                            const v1::PullRequest* request) {
  if (request->has_version()) return VersionPullStream::Start(environment_, context, *request);
  return PullStream::Start(environment_, context, *request);
}

}  // namespace ballast
