#include "server/rpc/pull_stream.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/batch.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/rpc/admission.h"
#include "server/rpc/request_memory.h"

namespace ballast {
namespace {

constexpr int64_t kRetryAfterMs = 200;

absl::Status CheckDigests(const PullOrder& order) {
  if (order.digests.empty()) return absl::OkStatus();
  if (order.slots != std::vector{StateSlot::kWeights}) {
    return absl::InvalidArgumentError("digests are of weights as served; with other slots leave them out");
  }
  if (order.step != 0) {
    return absl::InvalidArgumentError(absl::StrCat("digests are compared with the latest weights, and step is ",
                                                   order.step, ": leave one of them out"));
  }
  if (order.digests.size() == order.tensors.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(order.digests.size(), " digests for ", order.tensors.size(),
                                                 " tensors; wanted: one for each, or none"));
}

absl::Status CheckSeries(const PullOrder& order) {
  if (!order.series.average) return absl::OkStatus();
  if (!order.digests.empty()) {
    return absl::InvalidArgumentError("digests are of the weights, not of an average: leave one of them out");
  }
  for (const StateSlot slot : order.slots) {
    if (slot != StateSlot::kMomentum && slot != StateSlot::kVariance) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("an average has no ", NameOf(slot), ": pull its weights or master, and the rest without it"));
  }
  return absl::OkStatus();
}

}  // namespace

PullStream* PullStream::Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                              const v1::PullRequest& request) {
  return StartOf<PullStream>(environment, context, request);
}

PullStream::PullStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context)
    : StreamCall(environment.metrics, "Pull", context->peer(), context), environment_(environment) {}

absl::Status PullStream::Begin(const grpc::CallbackServerContext& context, const v1::PullRequest& request) {
  ASSIGN_OR_RETURN(const Caller caller, Enter(environment_, context, "Pull"));
  ASSIGN_OR_RETURN(place_, AdmitStream(environment_, caller, "Pull", request.run_id(), &record_));
  ASSIGN_OR_RETURN(run_, environment_.runs->Find(request.run_id()));
  RETURN_IF_ERROR(CheckRequestMemory(request, run_->spec().tensors.size(), run_->chunk_starts()->back()));
  gathers_ = request.takes_batches();
  PullOrder order{.step = request.step()};
  ASSIGN_OR_RETURN(order.tensors, ToTensors(request, run_->spec()));
  order.digests.assign(request.digests().begin(), request.digests().end());
  ASSIGN_OR_RETURN(order.slots, ToStateSlots(request));
  ASSIGN_OR_RETURN(order.parts, ToParts(request, order.slots, run_->spec(), run_->chunk_starts()));
  if (request.has_average()) {
    ASSIGN_OR_RETURN(order.series.average, ToAverage(request.average(), run_->spec()));
  }
  RETURN_IF_ERROR(CheckDigests(order));
  RETURN_IF_ERROR(CheckSeries(order));
  run_->Pull(shared_from_this(), std::move(order));
  return absl::OkStatus();
}

Written PullStream::WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) {
  absl::MutexLock lock(&mu_);
  if (ended_) return Written::kOver;
  const bool alone = !gathers_ || piece->bytes() > kMostBatchedBytes;
  FillWeights(chunk, run_->spec(), piece, alone ? &weights_ : weights_.add_batch());
  return Written::kLater;
}

void PullStream::Flush() {
  absl::MutexLock lock(&mu_);
  if (!ended_) StartWrite(&weights_);
}

void PullStream::TakeBack(WeightPiece* piece) {
  if (weights_.batch().empty()) {
    weights_.mutable_data()->swap(piece->data);
    if (gathers_) weights_.Clear();  // the next may be a batch
    return;
  }
  weights_.mutable_batch(taken_back_++)->mutable_data()->swap(piece->data);
  if (taken_back_ < weights_.batch_size()) return;
  weights_.clear_batch();
  taken_back_ = 0;
}

void PullStream::TellGrpc(const absl::Status& status) {
  TellReaderWhen(context_, status, kRetryAfterMs);
  Reactor::Finish(ToGrpc(status));
}

void PullStream::OnWriteDone(bool ok) {
  if (ok) run_->OnPullWritten(shared_from_this());
}

void PullStream::OnGone() {
  if (run_ != nullptr) run_->OnPullGone(shared_from_this());
}

}  // namespace ballast
