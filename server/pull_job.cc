#include "server/pull_job.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

PullJob::PullJob(const RunSpec* spec, PullSource source, std::shared_ptr<WeightSink> sink,
                 std::vector<uint32_t> tensors)
    : spec_(spec), source_(source), sink_(std::move(sink)), tensors_(std::move(tensors)) {}

void PullJob::EncodeNext() {
  if (next_ == tensors_.size()) return Stop(absl::OkStatus());
  const uint32_t tensor = tensors_[next_];
  if (source_.snapshot && !source_.snapshots->Keeps(*source_.snapshot)) {
    return Stop(absl::FailedPreconditionError(
        absl::StrCat("the snapshot that was pulled of run '", spec_->run_id,
                     "' is kept no longer: a later one took its place, or the run went back; pull another")));
  }
  const uint64_t version = source_.snapshot ? *source_.snapshot : source_.store->version(tensor);
  if (chunk_ == 0 || version != version_) {
    chunk_ = 0;
    version_ = version;
    label_ = source_.snapshot ? source_.snapshots->StepOf(version, tensor) : source_.store->step_of(tensor);
  }
  Encode(tensor);
}

void PullJob::Encode(uint32_t tensor) {
  const TensorSpec& t = spec_->tensors[tensor];
  const TensorRange range{tensor, ChunkBegin(*spec_, chunk_), ChunkEnd(*spec_, t, chunk_)};
  const bool last = range.last == t.elements;
  auto done = [self = shared_from_this(), last](const TaskResult&) { self->OnEncoded(last); };
  if (source_.snapshot) return source_.snapshots->Serve(*source_.snapshot, range, &piece_, std::move(done));
  source_.store->Serve(range, &piece_, std::move(done));
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
