#include "server/pull_job.h"

#include <utility>

namespace ballast {

PullJob::PullJob(const RunSpec* spec, ParameterStore* store, std::shared_ptr<WeightSink> sink,
                 std::vector<uint32_t> tensors)
    : spec_(spec), store_(store), sink_(std::move(sink)), tensors_(std::move(tensors)) {}

void PullJob::EncodeNext() {
  if (next_ == tensors_.size()) return Stop(absl::OkStatus());
  const uint32_t tensor = tensors_[next_];
  const uint64_t version = store_->version(tensor);
  if (chunk_ == 0 || version != version_) {
    chunk_ = 0;
    version_ = version;
    label_ = store_->step_of(tensor);
  }
  const TensorSpec& t = spec_->tensors[tensor];
  const TensorRange range{tensor, ChunkBegin(*spec_, chunk_), ChunkEnd(*spec_, t, chunk_)};
  const bool last = range.last == t.elements;
  store_->Serve(range, &piece_, [self = shared_from_this(), last](const TaskResult&) { self->OnEncoded(last); });
}

void PullJob::OnEncoded(bool last) {
  if (stopped_) return;
  const WeightsChunk chunk{.step = label_, .tensor = tensors_[next_], .chunk = chunk_, .last = last};
  ++chunk_;
  if (last) {
    ++next_;
    chunk_ = 0;
  }
  if (!sink_->WriteWeights(chunk, &piece_)) stopped_ = true;
}

void PullJob::OnWritten() {
  if (stopped_) return;
  sink_->TakeBack(&piece_);
  EncodeNext();
}

void PullJob::Stop(absl::Status status) {
  if (std::exchange(stopped_, true)) return;
  sink_->Finish(std::move(status));
}

}  // namespace ballast
