#include "server/store/digest_job.h"

#include <utility>

namespace ballast {

DigestJob::DigestJob(const RunSpec* spec, ParameterStore* store, const Plan& plan)
    : spec_(spec), store_(store), digests_(spec->tensors.size()), versions_(spec->tensors.size()) {
  scratch_.Reserve(plan.send_buffer_bytes, plan.send_buffer_scales);
  if (plan.small_buffer_bytes > 0) small_.resize(kSmallSendBuffers);
  for (Small& small : small_) small.piece.Reserve(plan.small_buffer_bytes, plan.small_buffer_scales);
}

uint64_t DigestJob::scratch_bytes() const {
  uint64_t bytes = scratch_.reserved_bytes();
  for (const Small& small : small_) bytes += small.piece.reserved_bytes();
  return bytes;
}

void DigestJob::Start(Done done) {
  later_.push_back(std::move(done));
  if (!encoding_) BeginPass();
}

void DigestJob::Abandon(const absl::Status& why) {
  for (Done& done : std::exchange(waiting_, {})) done(why);
  for (Done& done : std::exchange(later_, {})) done(why);
}

void DigestJob::BeginPass() {
  waiting_ = std::exchange(later_, {});
  tensor_ = 0;
  NextTensor();
}

void DigestJob::SkipUnchanged() {
  while (tensor_ < digests_.size() && versions_[tensor_] == store_->version(tensor_)) ++tensor_;
}

// Digests the next tensor that has changed, or several; if there is none, the pass is over.
void DigestJob::NextTensor() {
  SkipUnchanged();
  restarts_ = 0;
  if (tensor_ < digests_.size()) return IsSmall(tensor_) ? BeginSmall() : BeginTensor();
  for (Done& done : std::exchange(waiting_, {})) done(digests_);
  if (!later_.empty() && !encoding_) BeginPass();
}

bool DigestJob::IsSmall(uint32_t tensor) const {
  const TensorSpec& t = spec_->tensors[tensor];
  return IsSentSmall(t) && ChunkCount(*spec_, t) == 1;
}

void DigestJob::BeginSmall() {
  encoding_ = true;
  together_ = 0;
  for (; tensor_ < digests_.size() && together_ < small_.size() && IsSmall(tensor_); SkipUnchanged()) {
    Small& small = small_[together_++];
    small.tensor = tensor_;
    small.version = store_->version(tensor_);
    ++left_;
    store_->EncodeWeights({tensor_, 0, spec_->tensors[tensor_].elements}, &small.piece,
                          [this](const TaskResult&) { OnSmall(); });
    ++tensor_;
  }
}

void DigestJob::OnSmall() {
  if (--left_ > 0) return;
  encoding_ = false;
  if (waiting_.empty()) return later_.empty() ? void() : BeginPass();
  for (size_t i = 0; i < together_; ++i) {
    const auto& [piece, tensor, version] = small_[i];
    TensorDigester digester(&spec_->tensors[tensor]);
    digester.Add(piece.encoded(), piece.scales, 0);
    digests_[tensor] = digester.Digest();
    versions_[tensor] = version;
  }
  NextTensor();
}

void DigestJob::BeginTensor() {
  chunk_ = 0;
  version_ = store_->version(tensor_);
  digester_.emplace(&spec_->tensors[tensor_]);
  NextChunk();
}

void DigestJob::NextChunk() {
  const TensorSpec& t = spec_->tensors[tensor_];
  const TensorRange range{tensor_, ChunkBegin(*spec_, chunk_), ChunkEnd(*spec_, t, chunk_)};
  encoding_ = true;
  store_->EncodeWeights(range, &scratch_, [this](const TaskResult&) { OnChunk(); });
}

void DigestJob::OnChunk() {
  encoding_ = false;
  if (waiting_.empty()) return later_.empty() ? void() : BeginPass();
  digester_->Add(scratch_.encoded(), scratch_.scales, ChunkBegin(*spec_, chunk_));
  const bool last = ++chunk_ == ChunkCount(*spec_, spec_->tensors[tensor_]);
  const bool changed = store_->version(tensor_) != version_;
  if (changed && !last && restarts_++ < kMostRestarts) return BeginTensor();
  if (!last) return NextChunk();
  digests_[tensor_] = digester_->Digest();
  versions_[tensor_].reset();
  if (restarts_ <= kMostRestarts) versions_[tensor_] = version_;
  ++tensor_;
  NextTensor();
}

}  // namespace ballast
