#include "server/digest_job.h"

#include <utility>

namespace ballast {

namespace {

template <typename Values>
absl::Span<const std::byte> BytesOf(const Values& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(*values.data())};
}

}  // namespace

DigestJob::DigestJob(const RunSpec* spec, ParameterStore* store, const Plan& plan) : spec_(spec), store_(store) {
  scratch_.Reserve(plan.send_slot_bytes, plan.send_slot_scales);
}

void DigestJob::Start(Done done) {
  waiting_.push_back(std::move(done));
  restart_ = true;
  if (!encoding_) Restart();
}

void DigestJob::Abandon(const absl::Status& why) {
  for (Done& done : std::exchange(waiting_, {})) done(why);
}

void DigestJob::Restart() {
  restart_ = false;
  tensor_ = 0;
  chunk_ = 0;
  digests_.clear();
  digester_.emplace();
  scale_digester_.emplace();
  NextChunk();
}

void DigestJob::NextChunk() {
  const TensorSpec& t = spec_->tensors[tensor_];
  const TensorRange range{tensor_, ChunkBegin(*spec_, chunk_), ChunkEnd(*spec_, t, chunk_)};
  encoding_ = true;
  store_->Serve(range, &scratch_, [this](const TaskResult&) { OnChunk(); });
}

void DigestJob::OnChunk() {
  encoding_ = false;
  if (waiting_.empty()) return;
  if (restart_) return Restart();
  AddChunk();
  if (++chunk_ == ChunkCount(*spec_, spec_->tensors[tensor_])) {
    digests_.push_back(TensorDigest());
    digester_.emplace();
    scale_digester_.emplace();
    chunk_ = 0;
    if (++tensor_ == spec_->tensors.size()) {
      for (Done& done : std::exchange(waiting_, {})) done(digests_);
      return;
    }
  }
  NextChunk();
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
