#include "server/rpc/subscribe_stream.h"

#include <utility>

#include "proto/batch.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/rpc/admission.h"
#include "server/rpc/request_memory.h"

namespace ballast {
namespace {

constexpr int64_t kAskAgainMs = 1000;

}  // namespace

SubscribeStream* SubscribeStream::Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                                        const v1::SubscribeRequest& request) {
  return StartOf<SubscribeStream>(environment, context, request);
}

SubscribeStream::SubscribeStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context)
    : StreamCall(environment.metrics, "Subscribe", context->peer(), context), environment_(environment) {}

absl::Status SubscribeStream::Begin(const grpc::CallbackServerContext& context, const v1::SubscribeRequest& request) {
  ASSIGN_OR_RETURN(const Caller caller, Enter(environment_, context, "Subscribe"));
  ASSIGN_OR_RETURN(place_, AdmitStream(environment_, caller, "Subscribe", request.run_id(), &record_));
  if (environment_.relays != nullptr && (request.has_version() || request.has_average())) {
    return environment_.relays->Refusal();  // the weights' newest versions are here alone
  }
  RETURN_IF_ERROR(FindRun(request.run_id()));
  RETURN_IF_ERROR(CheckRequestMemory(request, run_->spec().tensors.size(), /*chunks=*/0));
  if (environment_.relays != nullptr && !request.format().empty() &&
      !IsServedIn(run_->spec(), kernels::FindWireFormat(request.format()))) {
    return environment_.relays->Refusal();
  }
  ASSIGN_OR_RETURN(FollowOrder order, ToFollowOrder(request, run_->spec()));
  run_->Follow(shared_from_this(), std::move(order));
  return absl::OkStatus();
}

absl::Status SubscribeStream::FindRun(const std::string& run_id) {
  if (environment_.relays != nullptr) {
    ASSIGN_OR_RETURN(run_, environment_.relays->Find(run_id));
  } else {
    ASSIGN_OR_RETURN(run_, environment_.runs->Find(run_id));
  }
  return absl::OkStatus();
}

void SubscribeStream::Write(const VersionOpening& opening) {
  v1::VersionBegin& begin = *message_.add_batch()->mutable_begin();
  *begin.mutable_id() = FromVersionId(opening.id);
  if (opening.base) *begin.mutable_base() = FromVersionId(*opening.base);
  begin.set_bytes(opening.bytes);
  begin.set_skipped(opening.skipped);
  begin.set_closed_unix_s(opening.closed_unix_s);
}

void SubscribeStream::Write(const VersionChunk& chunk) {
  v1::ChangedChunk& out = *message_.add_batch()->mutable_chunk();
  out.set_tensor(chunk.tensor);
  out.set_chunk(chunk.chunk);
  out.set_format(WireFormatAt(chunk.format).name);
  out.set_position_coding(static_cast<v1::PositionCoding>(chunk.position_coding));
  out.set_value_coding(static_cast<v1::ValueCoding>(chunk.value_coding));
  out.set_count(chunk.count);
  out.set_positions(chunk.positions.data(), chunk.positions.size());
  out.set_values(chunk.values.data(), chunk.values.size());
  out.mutable_scales()->Add(chunk.scales.begin(), chunk.scales.end());
  out.set_crc32c(chunk.crc32c);
  out.set_last(chunk.last);
  out.set_digest(chunk.digest);
  bytes_ += chunk.bytes();
  large_ = large_ || chunk.bytes() > kMostBatchedBytes;
}

void SubscribeStream::Write(const VersionClosing& closing) {
  v1::VersionEnd& end = *message_.add_batch()->mutable_end();
  *end.mutable_id() = FromVersionId(closing.id);
  end.set_changed(closing.changed);
  end.set_elements(closing.elements);
}

// A large one goes alone, but for what begins and ends a version.
bool SubscribeStream::HasRoom(uint64_t bytes) const {
  constexpr int kMostBesides = 2 * 8;  // what begins and ends versions that follow
  if (message_.batch_size() + kMostBesides > kMostBatchMessages) return false;
  return bytes_ == 0 || (!large_ && bytes <= kMostBatchedBytes && bytes + bytes_ <= kMostBatchBytes);
}

bool SubscribeStream::Send() {
  absl::MutexLock lock(&mu_);
  if (ended_) return false;
  StartWrite(&message_);
  return true;
}

void SubscribeStream::TellGrpc(const absl::Status& status) {
  TellReaderWhen(context_, status, kAskAgainMs);
  Reactor::Finish(ToGrpc(status));
}

void SubscribeStream::OnWriteDone(bool ok) {
  if (!ok) return;
  message_.Clear();
  bytes_ = 0;
  large_ = false;
  run_->OnVersionSent(shared_from_this());
}

void SubscribeStream::OnGone() {
  if (run_ != nullptr) run_->OnFollowerGone(shared_from_this());
}

}  // namespace ballast
