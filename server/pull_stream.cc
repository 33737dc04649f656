#include "server/pull_stream.h"

#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/convert.h"
#include "server/status_macros.h"

namespace ballast {

PullStream* PullStream::Start(const RpcEnvironment& environment, const v1::PullRequest& request,
                              const std::string& peer) {
  std::shared_ptr<PullStream> stream(new PullStream(environment, peer));
  stream->self_ = stream;
  if (auto s = stream->Begin(request); !s.ok()) stream->Finish(s);
  return stream.get();
}

PullStream::PullStream(const RpcEnvironment& environment, const std::string& peer)
    : record_(environment.metrics, "Pull", peer), environment_(environment) {}

absl::Status PullStream::Begin(const v1::PullRequest& request) {
  record_.set_run_id(request.run_id());
  ASSIGN_OR_RETURN(run_, environment_.runs->Find(request.run_id()));
  const size_t count = run_->spec().tensors.size();
  std::vector<uint32_t> tensors(request.tensors().begin(), request.tensors().end());
  if (tensors.empty()) {
    tensors.resize(count);
    std::iota(tensors.begin(), tensors.end(), 0);
  }
  for (const uint32_t tensor : tensors) {
    if (tensor < count) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor, ": run '", request.run_id(), "' has ", count,
                                                   " tensors, numbered from 0 in the order of its spec"));
  }
  run_->Pull(shared_from_this(), std::move(tensors), request.step());
  return absl::OkStatus();
}

bool PullStream::WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) {
  FillWeights(chunk, run_->spec(), piece, &weights_);
  absl::MutexLock lock(&mu_);
  if (finished_) return false;
  StartWrite(&weights_);
  return true;
}

void PullStream::TakeBack(WeightPiece* piece) { weights_.mutable_data()->swap(piece->data); }

void PullStream::Finish(absl::Status status) {
  absl::MutexLock lock(&mu_);
  if (std::exchange(finished_, true)) return;
  ended_with_ = status;
  Reactor::Finish(ToGrpc(status));
}

void PullStream::OnWriteDone(bool ok) {
  if (ok) run_->OnPullWritten(shared_from_this());
}

void PullStream::OnCancel() { Finish(absl::CancelledError("the connection was lost")); }

void PullStream::OnDone() {
  const auto self = std::move(self_);
  {
    absl::MutexLock lock(&mu_);
    record_.Done(ended_with_);
  }
  if (run_ != nullptr) run_->OnPullGone(self);
}

}  // namespace ballast
