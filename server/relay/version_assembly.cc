#include "server/relay/version_assembly.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/changes.h"
#include "proto/checksum.h"

#include "client/cpp/follow/incoming_version.h"
#include "server/convert/convert.h"
#include "server/plan/plan.h"

namespace ballast {
namespace {

// Whether it has all codes of its chunk, as they are.
bool IsWhole(const v1::ChangedChunk& chunk) {
  return chunk.position_coding() == v1::POSITION_CODING_ALL && chunk.value_coding() == v1::VALUE_CODING_CODES;
}

}  // namespace

VersionAssembly::VersionAssembly(const RelayedRun& run, const v1::VersionBegin& begin,
                                 std::shared_ptr<const WeightVersion> before, uint64_t last)
    : spec_(run.spec()),
      chunk_starts_(*run.chunk_starts()),
      most_change_bytes_(VersionChangeBytes(spec_, run.plan())),
      memory_(run.memory()),
      whole_(!begin.has_base()),
      before_(std::move(before)),
      came_(spec_.tensors.size()) {
  *version_ = {
      .id = ToVersionId(begin.id()), .number = last + 1 + begin.skipped(), .closed_unix_s = begin.closed_unix_s()};
  if (before_ == nullptr) {
    version_->pieces.resize(chunk_starts_.back());
    version_->digests.resize(spec_.tensors.size());
    change_ = nullptr;
    return;
  }
  version_->pieces = before_->pieces;
  version_->digests = before_->digests;
  change_->from = before_->id;
  change_->id = version_->id;
  change_->number = version_->number;
  change_->closed_unix_s = version_->closed_unix_s;
}

absl::Status VersionAssembly::Take(const v1::ChangedChunk& chunk) {
  const uint32_t tensor = chunk.tensor();
  const bool whole = IsWhole(chunk);
  VersionPiecePtr& piece = version_->pieces[chunk_starts_[tensor] + chunk.chunk()];
  absl::Status status;
  piece = PieceOf(chunk, whole ? nullptr : piece, &status);
  if (!status.ok()) return status;
  Keep(chunk, piece, whole);
  came_[tensor] = true;
  return chunk.last() ? CheckDigest(tensor, chunk.digest()) : absl::OkStatus();
}

// before: what it changes; nullptr: it is whole.
VersionPiecePtr VersionAssembly::PieceOf(const v1::ChangedChunk& chunk, VersionPiecePtr before,
                                         absl::Status* status) const {
  const TensorSpec& t = spec_.tensors[chunk.tensor()];
  const uint64_t width = WireBytes(t.serving_format);
  const uint64_t size = (ChunkEnd(spec_, t, chunk.chunk()) - ChunkBegin(spec_, chunk.chunk())) * width;
  std::vector<float> scales(chunk.scales().begin(), chunk.scales().end());
  auto memory = std::make_unique_for_overwrite<std::byte[]>(size);
  if (before != nullptr) std::memcpy(memory.get(), before->memory.get(), size);
  const absl::Span<std::byte> codes(memory.get(), size);
  if (auto s = ApplyChanges(ChangesIn(chunk), width, codes); !s.ok()) {
    *status = absl::Status(s.code(), absl::StrCat("'", t.name, "', chunk ", chunk.chunk(), ": ", s.message()));
    return nullptr;
  }
  const uint64_t bytes = size + scales.size() * sizeof(float) + kPieceOverhead;
  const uint32_t crc32c = before == nullptr ? chunk.crc32c() : Crc32c(codes);
  return std::make_shared<const VersionPiece>(VersionPiece{.memory = std::move(memory),
                                                           .size = size,
                                                           .scales = std::move(scales),
                                                           .crc32c = crc32c,
                                                           .share = {memory_, bytes}});
}

// What is kept of a change has a bound, like all that is kept: beyond that readers are sent whole versions.
void VersionAssembly::Keep(const v1::ChangedChunk& chunk, const VersionPiecePtr& now, bool whole) {
  if (change_ == nullptr) return;
  ChangedPiece& piece = change_->pieces.emplace_back(ChangedPiece{.tensor = chunk.tensor(),
                                                                  .chunk = chunk.chunk(),
                                                                  .last = chunk.last(),
                                                                  .digest = chunk.last() ? chunk.digest() : 0});
  if (whole) {
    piece.whole = now;
  } else {
    piece.changes = {.position_coding = static_cast<PositionCoding>(chunk.position_coding()),
                     .value_coding = static_cast<ValueCoding>(chunk.value_coding()),
                     .count = chunk.count(),
                     .positions = chunk.positions(),
                     .values = chunk.values()};
    piece.scales.assign(chunk.scales().begin(), chunk.scales().end());
    piece.crc32c = chunk.crc32c();
  }
  change_->bytes += piece.bytes();
  change_memory_ += (whole ? 0 : piece.bytes()) + kPieceOverhead;
  if (change_memory_ > most_change_bytes_) change_ = nullptr;
}

absl::Status VersionAssembly::CheckDigest(uint32_t tensor, uint64_t said) {
  const TensorSpec& t = spec_.tensors[tensor];
  TensorDigester digester(&t);
  for (uint64_t c = chunk_starts_[tensor]; c < chunk_starts_[tensor + 1]; ++c) {
    const VersionPiece& piece = *version_->pieces[c];
    digester.Add(piece.codes(), piece.scales, ChunkBegin(spec_, c - chunk_starts_[tensor]));
  }
  if (digester.Digest() != said) {
    return absl::DataLossError(absl::StrCat("'", t.name, "' has another digest than the daemon's"));
  }
  version_->digests[tensor] = said;
  return absl::OkStatus();
}

uint64_t VersionAssembly::ElementsThatCame() const {
  uint64_t elements = 0;
  for (size_t i = 0; i < came_.size(); ++i) elements += came_[i] ? spec_.tensors[i].elements : 0;
  return elements;
}

absl::StatusOr<VersionAssembly::Made> VersionAssembly::End(const v1::VersionEnd& end) {
  if (before_ == nullptr) {
    const auto missing = std::find(came_.begin(), came_.end(), false);
    if (missing != came_.end()) {
      const auto tensor = static_cast<size_t>(missing - came_.begin());
      return absl::InternalError(
          absl::StrCat("a version came whole, but for '", spec_.tensors[tensor].name, "', which is not here"));
    }
  }
  for (const VersionPiecePtr& piece : version_->pieces) version_->bytes += piece->bytes();
  // Of a version that came whole, but for some tensors, what has changed is that it came. A reader keeps changes beside its
  // weights until all are there, and writes a whole version at once.
  if (change_ != nullptr && whole_ && change_->bytes > version_->bytes / 2) change_ = nullptr;
  if (change_ != nullptr) {
    change_->elements = whole_ ? ElementsThatCame() : std::min(end.changed(), end.elements());
    change_->share = {memory_, change_memory_};
  }
  return Made{.version = version_, .change = change_};
}

}  // namespace ballast
