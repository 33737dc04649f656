#include "server/rpc/load_stream.h"

#include <utility>
#include <vector>

#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/rpc/admission.h"
#include "server/rpc/request_memory.h"

namespace ballast {

LoadStream* LoadStream::Start(const RpcEnvironment& environment, v1::LoadStateResponse* response,
                              const std::string& peer, absl::StatusOr<Caller> caller,
                              grpc::CallbackServerContext* context) {
  std::shared_ptr<LoadStream> stream(new LoadStream(environment, response, peer, context));
  stream->HoldUntilDone(stream);
  const absl::Status known = caller.ok() ? CheckKnown(environment, *caller) : caller.status();
  if (known.ok()) stream->caller_ = *std::move(caller);
  known.ok() ? stream->ReadOn() : stream->End(known);
  return stream.get();
}

LoadStream::LoadStream(const RpcEnvironment& environment, v1::LoadStateResponse* response, const std::string& peer,
                       grpc::CallbackServerContext* context)
    : StreamCall(environment.metrics, "LoadState", peer, context), environment_(environment), response_(response) {}

void LoadStream::ReadOn() {
  absl::MutexLock lock(&mu_);
  if (!ended_) StartRead(&request_);
}

void LoadStream::TellGrpc(const absl::Status& status) {
  // The run forgets the upload before the client learns of the end, so that the client may begin another.
  if (begun_) run_->AbandonLoad(call_);
  Finish(ToGrpc(status));
}

void LoadStream::OnReadDone(bool ok) {
  if (!ok && IsCut()) return OnCancel();  // what came is no upload, even where it ends with a tensor
  if (!ok && run_ == nullptr) return End(absl::InvalidArgumentError("LoadState without a message"));
  if (!ok) return FinishLoad();
  if (run_ != nullptr) return LoadRequest();
  if (auto s = Bind(); !s.ok()) return End(s);
  run_->BeginLoad(call_, request_.replace(), [self = shared_from_this()](const absl::Status& s) {
    if (!s.ok()) return self->End(s);
    bool over = false;
    {
      absl::MutexLock lock(&self->mu_);
      self->begun_ = true;
      over = self->ended_;
    }
    over ? self->run_->AbandonLoad(self->call_) : self->LoadRequest();
  });
}

bool LoadStream::IsCut() {
  absl::MutexLock lock(&mu_);
  return context_ != nullptr && context_->IsCancelled();
}

absl::Status LoadStream::Bind() {
  RETURN_IF_ERROR(CheckMessageBytes(request_.ByteSizeLong(), environment_));
  const auto session = environment_.sessions->Find(request_.session_token());
  if (!session) return absl::NotFoundError("no session has this token; Attach first");
  ASSIGN_OR_RETURN(run_, environment_.runs->Find(session->run_id));
  record_.set_run_id(session->run_id);
  ASSIGN_OR_RETURN(place_, AdmitStream(environment_, caller_, "LoadState", session->run_id, &record_));
  call_ = {.session = session->id, .number = static_cast<uint64_t>(environment_.sessions->NewId())};
  return absl::OkStatus();
}

void LoadStream::LoadRequest() {
  const size_t bytes = request_.ByteSizeLong();
  if (auto s = CheckMessageBytes(bytes, environment_); !s.ok()) return End(s);
  auto chunks = ToLoadChunks(&request_, run_->spec());
  if (!chunks.ok()) return End(chunks.status());
  LetGoOfLarge(bytes, &request_);
  run_->Load(call_, *std::move(chunks), [self = shared_from_this()](const absl::Status& s) {
    if (!s.ok()) return self->End(s);
    self->ReadOn();
  });
}

void LoadStream::FinishLoad() {
  run_->FinishLoad(call_, [self = shared_from_this()](absl::StatusOr<std::vector<uint64_t>> digests) {
    {
      absl::MutexLock lock(&self->mu_);
      if (self->ended_) return;
      if (digests.ok()) self->response_->mutable_digests()->Add(digests->begin(), digests->end());
    }
    self->End(digests.status());
  });
}

}  // namespace ballast
