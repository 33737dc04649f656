#include "server/store/pull_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/batch.h"

#include "server/base/clock.h"
#include "server/plan/plan.h"

namespace ballast {
namespace {

// At most, with one slot of a tensor that is a chunk.
uint64_t MessageBytes(const TensorSpec& t) {
  constexpr uint64_t kHeader = 128;
  return (t.elements + ScaleCount(t)) * sizeof(float) + kHeader;
}

}  // namespace

PullJob::PullJob(const RunSpec* spec, PullSource source, WeightCopies* copies, std::shared_ptr<WeightSink> sink,
                 WeightSeries series)
    : spec_(spec), source_(source), copies_(copies), sink_(std::move(sink)), series_(series) {}

void PullJob::Begin(std::vector<uint32_t> tensors, std::vector<StateSlot> slots, ChunkSet parts) {
  tensors_ = std::move(tensors);
  slots_ = std::move(slots);
  parts_ = std::move(parts);
  std::erase_if(tensors_, [this](uint32_t i) { return !NextIn(parts_, i, 0, ChunkCount(*spec_, spec_->tensors[i])); });
  uint64_t bytes = 0, scales = 0, small_bytes = 0, small_scales = 0;
  for (const uint32_t i : tensors_) {
    const TensorSpec& t = spec_->tensors[i];
    const uint64_t elements = std::min(t.elements, spec_->chunk_elements);
    for (const StateSlot slot : slots_) {
      const bool served = slot == StateSlot::kWeights;
      bytes = std::max(bytes, elements * (served ? WireBytes(t.serving_format) : sizeof(float)));
      if (served) scales = std::max(scales, ScalesOfChunks(*spec_, t).most);
    }
    if (!IsReadSmall(t)) continue;
    small_bytes = std::max(small_bytes, elements * sizeof(float));
    small_scales = std::max(small_scales, ScaleCount(t));
  }
  items_.resize(sink_->gathers() && small_bytes > 0 ? 1 + kSmallSendBuffers : 1);
  items_[0].piece.Reserve(bytes, scales);  // growing, it could come to take twice that
  for (size_t i = 1; i < items_.size(); ++i) items_[i].piece.Reserve(small_bytes, small_scales);
  EncodeNext();
}

bool PullJob::Has(uint32_t tensor, StateSlot slot) const {
  const kernels::PlaneKind kind = KindOf(slot);
  return kind == kernels::PlaneKind::kWeights || StateCodec(*spec_, tensor, kind) != nullptr;
}

bool PullJob::InLastSlot() const {
  return std::none_of(slots_.begin() + static_cast<std::ptrdiff_t>(slot_) + 1, slots_.end(),
                      [this](StateSlot slot) { return Has(tensors_[next_], slot); });
}

void PullJob::FindSlot() {
  while (next_ < tensors_.size()) {
    while (slot_ < slots_.size() && !Has(tensors_[next_], slots_[slot_])) ++slot_;
    if (slot_ < slots_.size()) return;
    ++next_;
    slot_ = sent_slots_ = 0;
  }
}

void PullJob::EncodeNext() {
  if (stopped_) return;
  FindSlot();
  if (next_ == tensors_.size()) return Stop(absl::OkStatus());
  if (source_.snapshot && !source_.snapshots->Keeps(*source_.snapshot)) {
    return Stop(absl::FailedPreconditionError(
        absl::StrCat("the snapshot that was pulled of run '", spec_->run_id,
                     "' is kept no longer: a later one took its place, or the run went back; pull another")));
  }
  if (copy_ == nullptr && !Unchanged() && ++restarts_ > kMostRestarts) return AskForCopy();
  EncodeGroup();
}

void PullJob::EncodeGroup() {
  group_ = 0;
  encoding_ = 1;  // this one, until all are begun
  uint64_t bytes = 0;
  do {
    bytes += MessageBytes(spec_->tensors[tensors_[next_]]);
    if (!begun() && copy_ == nullptr) LabelTensor(tensors_[next_]);
    Item& item = items_[group_++];
    ++encoding_;
    const absl::Status begun = Encode(&item);
    if (!begun.ok()) {
      --encoding_;
      Stop(begun);
      break;
    }
    item.chunk = Advance();
  } while (Joins(bytes));
  OnEncoded();
}

// Nothing of a tensor changes before this turn of the strand is over, so what is of one goes together.
bool PullJob::Joins(uint64_t bytes) const {
  if (group_ == items_.size() || copy_ != nullptr || next_ == tensors_.size()) return false;
  const TensorSpec& next = spec_->tensors[tensors_[next_]];
  if (!IsReadSmall(spec_->tensors[items_[0].chunk.tensor]) || !IsReadSmall(next)) return false;
  return bytes + MessageBytes(next) <= kMostBatchBytes;
}

void PullJob::LabelTensor(uint32_t tensor) {
  version_ = source_.snapshot ? *source_.snapshot : source_.store->version(tensor);
  label_ = source_.snapshot ? source_.snapshots->CountOf(version_, tensor) : source_.store->count(tensor);
}

bool PullJob::Unchanged() {
  if (!begun() || source_.snapshot || source_.store->version(tensors_[next_]) == version_) return true;
  chunk_ = 0;
  slot_ = sent_slots_ = 0;
  FindSlot();
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
  label_ = source_.store->count(tensors_[next_]);
  EncodeGroup();
}

bool PullJob::KeepsCopyTooLong(double now_s, double patience_s) const {
  const double waits_s = waits_since_s_ ? now_s - *waits_since_s_ : 0;
  return copy_ != nullptr && copy_waited_s_ + waits_s > patience_s + copy_bytes_ / kLeastBytesPerS;
}

void PullJob::GiveCopyBack() {
  if (!has_copy_ || encoding_ > 0) return;
  has_copy_ = false;
  copy_ = nullptr;
  copies_->GiveBack();
}

std::optional<uint64_t> PullJob::NextChunk(uint64_t from) const {
  const uint32_t tensor = tensors_[next_];
  if (slots_[slot_] == StateSlot::kUpdates) return from == 0 ? std::optional<uint64_t>(0) : std::nullopt;
  return NextIn(parts_, tensor, from, ChunkCount(*spec_, spec_->tensors[tensor]));
}

absl::Status PullJob::Encode(Item* item) {
  const uint32_t tensor = tensors_[next_];
  const TensorSpec& t = spec_->tensors[tensor];
  const StateSlot slot = slots_[slot_];
  chunk_ = *NextChunk(chunk_);
  const uint64_t first = ChunkBegin(*spec_, chunk_);
  const ChunkPart part = PartIn(parts_, tensor, chunk_, ChunkEnd(*spec_, t, chunk_) - first);
  const TensorRange range{tensor, first + part.begin, first + part.end};
  const StoreImage* const image = source_.snapshot ? source_.snapshots->ImageOf(*source_.snapshot, tensor) : copy_;
  WeightPiece* const piece = &item->piece;
  auto done = [self = shared_from_this()](const TaskResult&) { self->OnEncoded(); };
  switch (slot) {
    case StateSlot::kWeights:
      source_.store->EncodeWeights(range, piece, std::move(done), image, series_);
      return absl::OkStatus();
    case StateSlot::kMaster:
      source_.store->EncodeMaster(range, piece, std::move(done), image, series_);
      return absl::OkStatus();
    case StateSlot::kUpdates:
      piece->Resize(0);
      piece->scales.clear();
      piece->Seal();
      --encoding_;
      return absl::OkStatus();
    case StateSlot::kMomentum:
    case StateSlot::kVariance:
      break;
  }
  return source_.store->DecodeState(range, KindOf(slot), piece, &item->room, std::move(done), image);
}

WeightsChunk PullJob::Advance() {
  const bool last = !NextChunk(chunk_ + 1);  // of its slot
  const WeightsChunk chunk{.step = label_.step,
                           .tensor = tensors_[next_],
                           .chunk = chunk_,
                           .last = last && InLastSlot(),
                           .slot = slots_[slot_],
                           .updates = label_.updates,
                           .series = series_};
  ++chunk_;
  if (last) {
    ++slot_;
    ++sent_slots_;
    chunk_ = 0;
  }
  if (chunk.last) {
    ++next_;
    slot_ = sent_slots_ = 0;
    restarts_ = 0;
  }
  FindSlot();
  return chunk;
}

void PullJob::OnEncoded() {
  if (--encoding_ > 0) return;
  if (stopped_) {
    items_.clear();
    return GiveCopyBack();
  }
  if (items_[group_ - 1].chunk.last) GiveCopyBack();
  Write();
}

void PullJob::Write() {
  waits_since_s_ = MonotonicSeconds();
  group_bytes_ = 0;
  bool over = false;
  for (size_t i = 0; i < group_ && !over; ++i) {
    group_bytes_ += items_[i].piece.data.size();
    over = sink_->WriteWeights(items_[i].chunk, &items_[i].piece) == Written::kOver;
  }
  if (!over) return sink_->Flush();
  stopped_ = true;
  waits_since_s_.reset();
  items_.clear();
  GiveCopyBack();
}

void PullJob::OnWritten() {
  if (stopped_) return;
  if (waits_since_s_) copy_waited_s_ += MonotonicSeconds() - *waits_since_s_;
  waits_since_s_.reset();
  copy_bytes_ += static_cast<double>(group_bytes_);
  for (size_t i = 0; i < group_; ++i) sink_->TakeBack(&items_[i].piece);
  EncodeNext();
}

void PullJob::Stop(absl::Status status) {
  if (std::exchange(stopped_, true)) return;
  waits_since_s_.reset();
  const auto self = shared_from_this();  // an ask that is withdrawn lets go of it
  copies_->Withdraw(this);
  GiveCopyBack();
  if (encoding_ == 0) items_.clear();
  sink_->Finish(std::move(status));
}

}  // namespace ballast
