#include "server/store/pull_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/plan/plan.h"

namespace ballast {

PullJob::PullJob(const RunSpec* spec, PullSource source, WeightCopies* copies, std::shared_ptr<WeightSink> sink)
    : spec_(spec), source_(source), copies_(copies), sink_(std::move(sink)) {}

void PullJob::Begin(std::vector<uint32_t> tensors) {
  tensors_ = std::move(tensors);
  uint64_t bytes = 0, scales = 0;
  for (const uint32_t i : tensors_) {
    const TensorSpec& t = spec_->tensors[i];
    bytes = std::max(bytes, std::min(t.elements, spec_->chunk_elements) * WireBytes(t.serving_format));
    scales = std::max(scales, ScalesOfChunks(*spec_, t).most);
  }
  piece_.Reserve(bytes, scales);  // growing, it could come to take twice that
  EncodeNext();
}

void PullJob::EncodeNext() {
  if (stopped_) return;
  if (next_ == tensors_.size()) return Stop(absl::OkStatus());
  const uint32_t tensor = tensors_[next_];
  if (source_.snapshot && !source_.snapshots->Keeps(*source_.snapshot)) {
    return Stop(absl::FailedPreconditionError(
        absl::StrCat("the snapshot that was pulled of run '", spec_->run_id,
                     "' is kept no longer: a later one took its place, or the run went back; pull another")));
  }
  if (copy_ == nullptr && !Unchanged() && ++restarts_ > kMostRestarts) return AskForCopy();
  if (chunk_ == 0 && copy_ == nullptr) {
    version_ = source_.snapshot ? *source_.snapshot : source_.store->version(tensor);
    label_ = source_.snapshot ? source_.snapshots->StepOf(version_, tensor) : source_.store->step_of(tensor);
  }
  Encode(tensor);
}

bool PullJob::Unchanged() {
  if (chunk_ == 0 || source_.snapshot || source_.store->version(tensors_[next_]) == version_) return true;
  chunk_ = 0;
  return false;
}

void PullJob::AskForCopy() {
  copies_->Ask(this, tensors_[next_], [self = shared_from_this()](auto copy) { self->OnCopy(copy); });
}

void PullJob::OnCopy(absl::StatusOr<const StoreImage*> copy) {
  has_copy_ = true;
  if (stopped_) return GiveCopyBack();
  if (!copy.ok()) {
    Stop(absl::ResourceExhaustedError(absl::StrCat(
        "tensor '", spec_->tensors[tensors_[next_]].name,
        "' is updated faster than it is read, and there is no room for a copy of it: ", copy.status().message())));
    return;
  }
  copy_ = *copy;
  copy_waited_s_ = 0;
  copy_bytes_ = 0;
  label_ = source_.store->step_of(tensors_[next_]);
  Encode(tensors_[next_]);
}

bool PullJob::KeepsCopyTooLong(double now_s, double patience_s) const {
  const double waits_s = waits_since_s_ ? now_s - *waits_since_s_ : 0;
  return copy_ != nullptr && copy_waited_s_ + waits_s > patience_s + copy_bytes_ / kLeastBytesPerS;
}

void PullJob::GiveCopyBack() {
  if (!has_copy_ || encoding_) return;
  has_copy_ = false;
  copy_ = nullptr;
  copies_->GiveBack();
}

void PullJob::Encode(uint32_t tensor) {
  const TensorSpec& t = spec_->tensors[tensor];
  const TensorRange range{tensor, ChunkBegin(*spec_, chunk_), ChunkEnd(*spec_, t, chunk_)};
  const bool last = range.last == t.elements;
  encoding_ = true;
  auto done = [self = shared_from_this(), last](const TaskResult&) { self->OnEncoded(last); };
  if (source_.snapshot) return source_.snapshots->EncodeWeights(*source_.snapshot, range, &piece_, std::move(done));
  source_.store->EncodeWeights(range, &piece_, std::move(done), copy_);
}

void PullJob::OnEncoded(bool last) {
  encoding_ = false;
  if (stopped_) return GiveCopyBack();
  piece_bytes_ = piece_.data.size();
  const WeightsChunk chunk{.step = label_, .tensor = tensors_[next_], .chunk = chunk_, .last = last};
  ++chunk_;
  if (last) {
    ++next_;
    chunk_ = 0;
    restarts_ = 0;
    GiveCopyBack();
  }
  waits_since_s_ = MonotonicSeconds();
  if (sink_->WriteWeights(chunk, &piece_)) return;
  stopped_ = true;
  waits_since_s_.reset();
  GiveCopyBack();
}

void PullJob::OnWritten() {
  if (stopped_) return;
  if (waits_since_s_) copy_waited_s_ += MonotonicSeconds() - *waits_since_s_;
  waits_since_s_.reset();
  copy_bytes_ += static_cast<double>(piece_bytes_);
  sink_->TakeBack(&piece_);
  EncodeNext();
}

void PullJob::Stop(absl::Status status) {
  if (std::exchange(stopped_, true)) return;
  waits_since_s_.reset();
  const auto self = shared_from_this();  // an ask that is withdrawn lets go of it
  copies_->Withdraw(this);
  GiveCopyBack();
  sink_->Finish(std::move(status));
}

}  // namespace ballast
