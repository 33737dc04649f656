#include "server/store/digest_job.h"

#include <utility>

namespace ballast {

namespace {

template <typename Values>
absl::Span<const std::byte> BytesOf(const Values& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(*values.data())};
}

}  // namespace

DigestJob::DigestJob(const RunSpec* spec, ParameterStore* store, const Plan& plan)
    : spec_(spec), store_(store), digests_(spec->tensors.size()), versions_(spec->tensors.size()) {
  scratch_.Reserve(plan.send_buffer_bytes, plan.send_buffer_scales);
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

// Digests the next tensor that has changed; if there is none, the pass is over.
void DigestJob::NextTensor() {
  while (tensor_ < digests_.size() && versions_[tensor_] == store_->version(tensor_)) ++tensor_;
  restarts_ = 0;
  if (tensor_ < digests_.size()) return BeginTensor();
  for (Done& done : std::exchange(waiting_, {})) done(digests_);
  if (!later_.empty() && !encoding_) BeginPass();
}

void DigestJob::BeginTensor() {
  chunk_ = 0;
  version_ = store_->version(tensor_);
  digester_.emplace();
  scale_digester_.emplace();
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
  AddChunk();
  const bool last = ++chunk_ == ChunkCount(*spec_, spec_->tensors[tensor_]);
  const bool changed = store_->version(tensor_) != version_;
  if (changed && !last && restarts_++ < kMostRestarts) return BeginTensor();
  if (!last) return NextChunk();
  digests_[tensor_] = TensorDigest();
  versions_[tensor_].reset();
  if (restarts_ <= kMostRestarts) versions_[tensor_] = version_;
  ++tensor_;
  NextTensor();
}

// A row's scale comes with every chunk that has elements of the row, and is counted with the first.
void DigestJob::AddChunk() {
  digester_->Add(BytesOf(scratch_.data));
  const TensorSpec& t = spec_->tensors[tensor_];
  if (t.row_length == 0) return;
  const size_t seen = ChunkBegin(*spec_, chunk_) % t.row_length == 0 ? 0 : 1;
  scale_digester_->Add(BytesOf(scratch_.scales).subspan(seen * sizeof(float)));
}

uint64_t DigestJob::TensorDigest() const {
  if (spec_->tensors[tensor_].row_length == 0) return digester_->Digest();
  return WeightDigest(BytesOf(std::vector{digester_->Digest(), scale_digester_->Digest()}));
}

}  // namespace ballast
