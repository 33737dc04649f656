#include "server/rpc/version_pull_stream.h"

#include <utility>

#include "proto/batch.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/rpc/admission.h"
#include "server/rpc/request_memory.h"

namespace ballast {
namespace {

constexpr int64_t kPullAgainMs = 1000;

}  // namespace

VersionPullStream* VersionPullStream::Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                                            const v1::PullRequest& request) {
  return StartOf<VersionPullStream>(environment, context, request);
}

VersionPullStream::VersionPullStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context)
    : StreamCall(environment.metrics, "Pull", context->peer(), context), environment_(environment) {}

absl::Status VersionPullStream::Begin(const grpc::CallbackServerContext& context, const v1::PullRequest& request) {
  ASSIGN_OR_RETURN(const Caller caller, Enter(environment_, context, "Pull"));
  ASSIGN_OR_RETURN(place_, AdmitStream(environment_, caller, "Pull", request.run_id(), &record_));
  ASSIGN_OR_RETURN(run_, environment_.runs->Find(request.run_id()));
  RETURN_IF_ERROR(CheckRequestMemory(request, run_->spec().tensors.size(), run_->chunk_starts()->back()));
  gathers_ = request.takes_batches();
  ASSIGN_OR_RETURN(FollowOrder order, ToFollowOrder(request, run_->spec()));
  run_->Follow(shared_from_this(), std::move(order));
  return absl::OkStatus();
}

void VersionPullStream::Write(const VersionChunk& chunk) {
  large_ = chunk.bytes() > kMostBatchedBytes;
  v1::Weights& out = !gathers_ || large_ ? message_ : *message_.add_batch();
  out.set_step(step_);
  out.set_tensor(chunk.tensor);
  out.set_chunk(chunk.chunk);
  out.set_format(WireFormatAt(chunk.format).name);
  out.set_last(chunk.last);
  out.mutable_scales()->Add(chunk.scales.begin(), chunk.scales.end());
  out.set_data(chunk.values.data(), chunk.values.size());
  out.set_crc32c(chunk.crc32c);
  bytes_ += chunk.bytes();
}

bool VersionPullStream::HasRoom(uint64_t bytes) const {
  if (bytes_ == 0) return true;
  if (!gathers_ || large_ || message_.batch_size() + 1 > kMostBatchMessages) return false;
  return bytes <= kMostBatchedBytes && bytes + bytes_ <= kMostBatchBytes;
}

bool VersionPullStream::Send() {
  absl::MutexLock lock(&mu_);
  if (ended_) return false;
  if (bytes_ > 0) {
    StartWrite(&message_);
  } else {
    run_->OnVersionSent(shared_from_this());  // a version's beginning or end alone, of which Pull has no message
  }
  return true;
}

void VersionPullStream::TellGrpc(const absl::Status& status) {
  TellReaderWhen(context_, status, kPullAgainMs);
  Reactor::Finish(ToGrpc(status));
}

void VersionPullStream::OnWriteDone(bool ok) {
  if (!ok) return;
  message_.Clear();
  bytes_ = 0;
  large_ = false;
  run_->OnVersionSent(shared_from_this());
}

void VersionPullStream::OnGone() {
  if (run_ != nullptr) run_->OnFollowerGone(shared_from_this());
}

}  // namespace ballast
