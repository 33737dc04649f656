#include "server/follow/follow_job.h"

#include <algorithm>

#include "server/base/clock.h"

namespace ballast {

FollowJob::FollowJob(const RunSpec* spec, const Plan* plan, ChunkSet::Starts chunk_starts, FollowOrder order,
                     std::shared_ptr<VersionSink> sink)
    : spec_(spec),
      plan_(plan),
      chunk_starts_(std::move(chunk_starts)),
      every_(std::max<uint64_t>(order.every, 1)),
      have_(order.have),
      digests_(std::move(order.digests)),
      sink_(std::move(sink)),
      alone_(order.version.has_value()),
      tensors_(std::move(order.tensors)) {}

bool FollowJob::WantsAfter(VersionId id) const {
  if (have_ == id) return false;
  if (!have_ || id.epoch != have_->epoch) return true;
  // A reader may have come from another daemon that has the run's versions sooner.
  if (id.generation != have_->generation) return id.generation > have_->generation;
  return id.step >= have_->step && id.step - have_->step >= every_;
}

void FollowJob::Offer(const VersionHistory& history) {
  if (!follows() || history.newest == nullptr) return;
  if (!WantsAfter(history.newest->id)) return wanted_since_s_.reset();
  if (!wanted_since_s_) wanted_since_s_ = MonotonicSeconds();
  if (in_flight_) return;
  for (const auto& change : history.changes) {
    if (have_ == change->from) have_number_ = change->number - 1;
  }
  parcels_ = Path(history);
  if (parcels_.empty()) parcels_ = {history.newest};
  place_ = 0;
  opened_ = false;
  bytes_ = 0;
  began_s_ = progress_s_ = MonotonicSeconds();
  SendMore();
}

std::vector<FollowJob::Parcel> FollowJob::Path(const VersionHistory& history) const {
  if (!have_) return {};
  const auto& changes = history.changes;
  const auto from = std::find_if(changes.begin(), changes.end(), [&](const auto& c) { return c->from == *have_; });
  uint64_t bytes = 0;
  std::for_each(from, changes.end(), [&](const auto& c) { bytes += c->bytes; });
  if (bytes > history.newest->bytes) return {};
  return {from, changes.end()};
}

bool FollowJob::LeavesOut(const std::vector<uint64_t>& digests, uint32_t tensor) const {
  if (!tensors_.empty() && !tensors_[tensor]) return true;
  return !digests_.empty() && digests_[tensor] == digests[tensor];
}

uint64_t FollowJob::BytesOf(const std::vector<uint64_t>& digests) const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < digests.size(); ++i) {
    if (LeavesOut(digests, i)) continue;
    const TensorSpec& t = spec_->tensors[i];
    bytes += ServingBytes(t) + ScalesOfChunks(*spec_, t).all * sizeof(float);
  }
  return bytes;
}

void FollowJob::SendAlone(Parcel parcel) {
  if (stopped_) return;
  parcels_ = {std::move(parcel)};
  began_s_ = progress_s_ = MonotonicSeconds();
  SendMore();
}

void FollowJob::Open(const VersionOpening& opening) {
  sink_->Write(opening);
  gathered_ = opened_ = true;
  next_ = 0;
  tensor_ = 0;
}

void FollowJob::Close(VersionId id, uint64_t number, uint64_t changed) {
  sink_->Write(VersionClosing{.id = id, .changed = changed, .elements = plan_->parameters});
  gathered_ = true;
  have_ = id;
  have_number_ = number;
  digests_ = {};
  wanted_since_s_.reset();  // it gets on
  opened_ = false;
  parcels_[place_++] = {};  // which may be all that keeps it
}

void FollowJob::SetWhole(const VersionPiece& piece, VersionChunk* chunk) const {
  chunk->values = {reinterpret_cast<const char*>(piece.memory.get()), piece.size};
  chunk->count = piece.size / WireBytes(chunk->format);
  chunk->scales = piece.scales;
  chunk->crc32c = piece.crc32c;
}

bool FollowJob::Write(const VersionChunk& chunk, uint64_t* sent) {
  if (!sink_->HasRoom(chunk.bytes())) return false;
  sink_->Write(chunk);
  gathered_ = true;
  bytes_ += chunk.bytes();
  *sent += chunk.bytes();
  return true;
}

bool FollowJob::WriteSome(const std::shared_ptr<const VersionChange>& change) {
  if (!opened_ && !sink_->HasRoom(0)) return true;
  if (!opened_) {
    Open({.id = change->id, .base = change->from, .bytes = change->bytes, .closed_unix_s = change->closed_unix_s});
  }
  for (; next_ < change->pieces.size(); ++next_) {
    const ChangedPiece& piece = change->pieces[next_];
    VersionChunk chunk{.tensor = piece.tensor,
                       .chunk = piece.chunk,
                       .format = spec_->tensors[piece.tensor].serving_format,
                       .last = piece.last,
                       .digest = piece.digest};
    if (piece.whole != nullptr) {
      SetWhole(*piece.whole, &chunk);
    } else {
      chunk.position_coding = piece.changes.position_coding;
      chunk.value_coding = piece.changes.value_coding;
      chunk.count = piece.changes.count;
      chunk.positions = piece.changes.positions;
      chunk.values = piece.changes.values;
      chunk.scales = piece.scales;
      chunk.crc32c = piece.crc32c;
    }
    if (!Write(chunk, &sent_.changes)) return true;
  }
  Close(change->id, change->number, change->elements);
  return false;
}

bool FollowJob::WriteWhole(const Whole& whole, absl::FunctionRef<const VersionPiece*()> piece) {
  if (!opened_ && !sink_->HasRoom(0)) return true;
  if (!opened_) {
    const uint64_t skipped = have_number_ && *have_number_ + 1 < whole.number ? whole.number - *have_number_ - 1 : 0;
    Open({.id = whole.id, .bytes = BytesOf(*whole.digests), .skipped = skipped, .closed_unix_s = whole.closed_unix_s});
  }
  const std::vector<uint64_t>& starts = *chunk_starts_;
  for (; next_ < starts.back(); ++next_) {
    while (next_ >= starts[tensor_ + 1]) ++tensor_;
    if (LeavesOut(*whole.digests, tensor_)) continue;
    const bool last = next_ + 1 == starts[tensor_ + 1];
    VersionChunk chunk{.tensor = tensor_,
                       .chunk = next_ - starts[tensor_],
                       .format = spec_->tensors[tensor_].serving_format,
                       .last = last,
                       .digest = last ? (*whole.digests)[tensor_] : 0};
    const VersionPiece* const here = piece();
    if (here == nullptr) return true;
    SetWhole(*here, &chunk);
    if (!Write(chunk, &sent_.whole)) return true;
    fetched_ = nullptr;
  }
  Close(whole.id, whole.number, plan_->parameters);
  return false;
}

bool FollowJob::WriteSome(const std::shared_ptr<const WeightVersion>& version) {
  return WriteWhole({.id = version->id,
                     .number = version->number,
                     .closed_unix_s = version->closed_unix_s,
                     .digests = &version->digests},
                    [&] { return version->pieces[next_].get(); });
}

bool FollowJob::WriteSome(const std::shared_ptr<StoredVersion>& version) {
  const VersionFileInfo& info = version->info();
  const Whole whole{.id = info.id, .closed_unix_s = info.closed_unix_s, .digests = &info.digests};
  return WriteWhole(whole, [&]() -> const VersionPiece* {
    if (fetched_ == nullptr) Fetch(*version);
    return fetched_.get();
  });
}

void FollowJob::Fetch(StoredVersion& version) {
  if (std::exchange(fetching_, true)) return;
  version.Read(tensor_, next_ - (*chunk_starts_)[tensor_],
               [self = std::weak_ptr(self_)](absl::StatusOr<VersionPiecePtr> piece) {
                 const auto there = self.lock();
                 if (there == nullptr) return;
                 FollowJob& job = **there;
                 job.fetching_ = false;
                 if (job.stopped_) return;
                 if (!piece.ok()) return job.Stop(piece.status());
                 job.fetched_ = *std::move(piece);
                 if (!job.in_flight_) job.SendMore();
               });
}

void FollowJob::SendMore() {
  bool full = false;
  while (sending() && !full) {
    full = std::visit([this](const auto& parcel) { return WriteSome(parcel); }, Parcel(parcels_[place_]));
  }
  if (!sending()) parcels_.clear();  // lets go of the versions
  if (!sending()) place_ = 0;
  if (!std::exchange(gathered_, false)) return;  // the disk has what comes next
  in_flight_ = sink_->Send();
  if (!in_flight_) stopped_ = true;
}

void FollowJob::OnSent() {
  in_flight_ = false;
  progress_s_ = MonotonicSeconds();
  if (!stopped_ && sending()) return SendMore();
  if (alone_) Stop(absl::OkStatus());
}

void FollowJob::Stop(absl::Status status) {
  if (std::exchange(stopped_, true)) return;
  parcels_.clear();
  place_ = 0;
  sink_->Finish(std::move(status));
}

bool FollowJob::Keeps(const WeightVersion* newest) const {
  if (!sending() || std::holds_alternative<std::shared_ptr<StoredVersion>>(parcels_[place_])) return false;
  const auto* whole = std::get_if<std::shared_ptr<const WeightVersion>>(&parcels_[place_]);
  return whole == nullptr || whole->get() != newest;
}

bool FollowJob::IsSlow(double now_s, double patience_s) const {
  if (!in_flight_) return false;
  return now_s - progress_s_ > patience_s ||
         now_s - began_s_ > patience_s + static_cast<double>(bytes_) / kLeastBytesPerS;
}

}  // namespace ballast
