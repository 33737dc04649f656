#include "client/cpp/follow/incoming_version.h"

#include <google/protobuf/util/message_differencer.h>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

namespace ballast {
namespace {

absl::Status OutOfPlace(const std::string& what) {
  return absl::InternalError(absl::StrCat("a version came that this client cannot read: ", what));
}

std::string VersionText(const v1::VersionId& id) {
  return absl::StrCat("step ", id.step(), " of generation ", id.generation());
}

uint64_t BytesIn(const v1::ChangedChunk& chunk) {
  return chunk.positions().size() + chunk.values().size() + static_cast<uint64_t>(chunk.scales_size()) * sizeof(float);
}

}  // namespace

ChangesView ChangesIn(const v1::ChangedChunk& chunk) {
  return {.position_coding = static_cast<PositionCoding>(chunk.position_coding()),
          .value_coding = static_cast<ValueCoding>(chunk.value_coding()),
          .count = chunk.count(),
          .positions = chunk.positions(),
          .values = chunk.values()};
}

bool IsSameVersion(const v1::VersionId& a, const v1::VersionId& b) {
  return google::protobuf::util::MessageDifferencer::Equals(a, b);
}

absl::StatusOr<IncomingVersion> IncomingVersion::Begin(const v1::VersionBegin& begin,
                                                       const std::optional<v1::VersionId>& have,
                                                       const TensorTable& tensors, uint64_t whole_bytes,
                                                       uint64_t kept_bytes) {
  if (begin.has_base() && !(have && IsSameVersion(begin.base(), *have))) {
    return OutOfPlace(
        absl::StrCat("it changes ", VersionText(begin.base()), ", and here is ", have ? VersionText(*have) : "none"));
  }
  // A chunk comes whole where that takes fewer bytes. A scale comes twice where two chunks share its row.
  const uint64_t kept = begin.has_base() ? kept_bytes : 0;
  if (begin.bytes() > 2 * whole_bytes - kept) {
    return OutOfPlace(
        absl::StrCat("it is said to have ", begin.bytes(), " bytes, and all weights of the run have ", whole_bytes));
  }
  return IncomingVersion(begin, tensors);
}

absl::Status IncomingVersion::Take(const v1::ChangedChunk& chunk) {
  if (auto s = CheckOrder(chunk); !s.ok()) return s;
  if (auto s = CheckSizes(chunk); !s.ok()) return s;
  if (auto s = whole() ? CheckWhole(chunk) : absl::OkStatus(); !s.ok()) return s;
  if (ExtendCrc32c(Crc32c(BytesOf(chunk.positions())), BytesOf(chunk.values())) != chunk.crc32c()) {
    return absl::DataLossError(
        absl::StrCat(tensors_->Name(chunk.tensor()), ", chunk ", chunk.chunk(), " arrived damaged"));
  }
  bytes_ += BytesIn(chunk);
  came_[chunk.tensor()] = true;
  tensor_ = chunk.last() ? std::nullopt : std::optional(chunk.tensor());
  next_chunk_ = chunk.chunk() + 1;
  return absl::OkStatus();
}

absl::Status IncomingVersion::CheckOrder(const v1::ChangedChunk& chunk) const {
  const uint32_t tensor = chunk.tensor();
  if (tensor >= tensors_->size()) {
    return OutOfPlace(absl::StrCat("it names tensor ", tensor, ", and the run has ", tensors_->size()));
  }
  const std::string name = tensors_->Name(tensor);
  if (chunk.chunk() >= (*tensors_)[tensor].chunks) {
    return OutOfPlace(
        absl::StrCat(name, " has ", (*tensors_)[tensor].chunks, " chunks, and number ", chunk.chunk(), " came"));
  }
  if (tensor_ && *tensor_ != tensor) {
    return OutOfPlace(absl::StrCat(name, " came before the last chunk of ", tensors_->Name(*tensor_)));
  }
  if (!tensor_ && came_[tensor]) return OutOfPlace(absl::StrCat(name, " came twice"));
  if (tensor_ && chunk.chunk() < next_chunk_) {
    return OutOfPlace(absl::StrCat("chunk ", chunk.chunk(), " of ", name, " came after chunk ", next_chunk_ - 1));
  }
  return absl::OkStatus();
}

// Of a version that changes no other one all chunks of a tensor come, with all of their codes.
absl::Status IncomingVersion::CheckWhole(const v1::ChangedChunk& chunk) const {
  const bool all = chunk.position_coding() == v1::POSITION_CODING_ALL && chunk.value_coding() == v1::VALUE_CODING_CODES;
  const bool next = chunk.chunk() == (tensor_ ? next_chunk_ : 0);
  const bool last = chunk.chunk() + 1 == (*tensors_)[chunk.tensor()].chunks;
  if (all && next && chunk.last() == last) return absl::OkStatus();
  return OutOfPlace(absl::StrCat("it is a whole one, and chunk ", chunk.chunk(), " of ", tensors_->Name(chunk.tensor()),
                                 " came ", all ? "out of order" : "as a change"));
}

absl::Status IncomingVersion::CheckSizes(const v1::ChangedChunk& chunk) const {
  const WireTensor& tensor = (*tensors_)[chunk.tensor()];
  const ShardPiece piece = tensors_->PieceOf(chunk.tensor(), chunk.chunk());
  const auto wrong = [&](const std::string& what) {
    return OutOfPlace(absl::StrCat("chunk ", chunk.chunk(), " of ", tensors_->Name(chunk.tensor()), " ", what));
  };
  if (chunk.format() != tensor.serving) {
    return wrong(absl::StrCat("is in '", chunk.format(), "', and the run serves it in '", tensor.serving, "'"));
  }
  if (!v1::PositionCoding_IsValid(chunk.position_coding()) || !v1::ValueCoding_IsValid(chunk.value_coding())) {
    return wrong("is in a coding that it does not know; update it");
  }
  if (chunk.count() > piece.size()) {
    return wrong(absl::StrCat("has ", piece.size(), " elements, and ", chunk.count(), " came"));
  }
  const uint64_t scales = ScalesNeeded(tensor.row_length, piece.first, piece.last);
  if (static_cast<uint64_t>(chunk.scales_size()) != scales) {
    return wrong(absl::StrCat("needs ", scales, " scales, and ", chunk.scales_size(), " came"));
  }
  if (bytes_ + BytesIn(chunk) > begin_.bytes()) {
    return wrong(absl::StrCat("is past the ", begin_.bytes(), " bytes that the version was said to have"));
  }
  return absl::OkStatus();
}

absl::StatusOr<FollowedVersion> IncomingVersion::End(const v1::VersionEnd& end) const {
  if (!IsSameVersion(end.id(), id())) {
    return OutOfPlace(absl::StrCat(VersionText(id()), " ended as ", VersionText(end.id())));
  }
  if (tensor_) return OutOfPlace(absl::StrCat("it ended before the last chunk of ", tensors_->Name(*tensor_)));
  if (bytes_ != begin_.bytes()) {
    return OutOfPlace(absl::StrCat("it was said to have ", begin_.bytes(), " bytes, and ", bytes_, " came"));
  }
  FollowedVersion version{.step = id().step(),
                          .generation = id().generation(),
                          .changed_elements = end.changed(),
                          .elements = end.elements(),
                          .received_bytes = bytes_,
                          .skipped = begin_.skipped(),
                          .closed_unix_s = begin_.closed_unix_s()};
  if (!whole()) version.base_step = begin_.base().step();
  return version;
}

}  // namespace ballast
