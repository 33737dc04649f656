#include "server/digest_job.h"

#include <utility>

namespace ballast {

DigestJob::DigestJob(const RunSpec* spec, ParameterStore* store, uint64_t scratch_bytes) : spec_(spec), store_(store) {
  scratch_.reserve(scratch_bytes);
  scratch_bytes_ = scratch_.capacity();
}

void DigestJob::Start(Done done) {
  Abandon(absl::AbortedError("another request for the digests took this one's place"));
  done_ = std::move(done);
  restart_ = true;
  if (!encoding_) Restart();
}

void DigestJob::Abandon(absl::Status why) {
  if (done_) std::exchange(done_, nullptr)(std::move(why));
}

void DigestJob::Restart() {
  restart_ = false;
  tensor_ = 0;
  chunk_ = 0;
  digests_.clear();
  digester_.emplace();
  NextChunk();
}

void DigestJob::NextChunk() {
  const TensorSpec& t = spec_->tensors[tensor_];
  const TensorRange range{tensor_, ChunkBegin(*spec_, chunk_), ChunkEnd(*spec_, t, chunk_)};
  scratch_.resize((range.last - range.first) * WireBytes(t.serving_format));
  encoding_ = true;
  store_->Serve(range, reinterpret_cast<std::byte*>(scratch_.data()), [this](const TaskResult&) { OnChunk(); });
}

void DigestJob::OnChunk() {
  encoding_ = false;
  if (!done_) return;
  if (restart_) return Restart();
  digester_->Add({reinterpret_cast<const std::byte*>(scratch_.data()), scratch_.size()});
  if (++chunk_ == ChunkCount(*spec_, spec_->tensors[tensor_])) {
    digests_.push_back(digester_->Digest());
    digester_.emplace();
    chunk_ = 0;
    if (++tensor_ == spec_->tensors.size()) return std::exchange(done_, nullptr)(std::move(digests_));
  }
  NextChunk();
}

}  // namespace ballast
