// AttachRequest.coverage and PullRequest.parts: from the wire's ranges of elements to chunks and parts of them.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

using Ranges = google::protobuf::RepeatedPtrField<v1::ElementRange>;
using Coverages = google::protobuf::RepeatedPtrField<v1::TensorCoverage>;

// What a field of a tensor's coverage says.
struct Pieces {
  std::vector<bool> chunks;  // of which there are some
  std::vector<ChunkSet::Piece> parts;
};

struct FieldAt {
  absl::string_view message, field;
};

absl::Status Refuse(const FieldAt& at, const TensorSpec& t, const v1::ElementRange& range, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(at.message, " of tensor '", t.name, "', ", at.field, " [",
                                                 range.begin(), ", ", range.end(), "): ", why));
}

// Adds a range that lies in the tensor behind those before it.
absl::Status AddRange(const v1::ElementRange& range, const RunSpec& spec, const TensorSpec& t, const FieldAt& at,
                      Pieces* made) {
  const uint64_t c = spec.chunk_elements;
  for (uint64_t k = range.begin() / c; ChunkBegin(spec, k) < range.end(); ++k) {
    const uint64_t first = ChunkBegin(spec, k), last = ChunkEnd(spec, t, k);
    const uint64_t begin = std::max(range.begin(), first), end = std::min(range.end(), last);
    if (made->chunks[k]) {
      return Refuse(at, t, range,
                    absl::StrCat("chunk ", k, ", elements [", first, ", ", last,
                                 "), has a piece of the range ahead of it, too; of a chunk there is at most one "
                                 "piece: write ranges that touch as one"));
    }
    made->chunks[k] = true;
    if (begin == first && end == last) continue;
    if (made->parts.size() == ChunkSet::kMostParts) {
      return Refuse(at, t, range,
                    absl::StrCat("chunk ", k, " would be the third of the tensor that is not whole, of ",
                                 ChunkSet::kMostParts, "; ranges but one must begin and end on multiples of ", c,
                                 " (RunPlan.chunk_elements), or end where the tensor does"));
    }
    made->parts.push_back({k,
                           {.begin = static_cast<uint32_t>(begin - first),
                            .end = static_cast<uint32_t>(end - first),
                            .of = static_cast<uint32_t>(last - first)}});
  }
  return absl::OkStatus();
}

absl::StatusOr<Pieces> ToPieces(const Ranges& ranges, const RunSpec& spec, const TensorSpec& t, const FieldAt& at) {
  Pieces made{.chunks = std::vector<bool>(ChunkCount(spec, t))};
  uint64_t last_end = 0;
  for (const v1::ElementRange& range : ranges) {
    if (range.begin() >= range.end()) return Refuse(at, t, range, "it is empty; leave it out");
    if (range.end() > t.elements) {
      return Refuse(at, t, range, absl::StrCat("the tensor has ", t.elements, " elements"));
    }
    if (range.begin() < last_end) return Refuse(at, t, range, "it begins before the range ahead of it ends");
    RETURN_IF_ERROR(AddRange(range, spec, t, at, &made));
    last_end = range.end();
  }
  return made;
}

// A scale goes with whole chunks: of a row that is cut it would be of elements that are not there.
absl::StatusOr<Pieces> ToReceived(const Ranges& ranges, const RunSpec& spec, const TensorSpec& t,
                                  absl::string_view message, bool served) {
  ASSIGN_OR_RETURN(Pieces pieces, ToPieces(ranges, spec, t, {message, "receives"}));
  if (!served || t.row_length == 0 || pieces.parts.empty()) return pieces;
  return absl::InvalidArgumentError(
      absl::StrCat(message, " of tensor '", t.name, "', receives: chunk ", pieces.parts[0].chunk,
                   " would be sent in part, but the tensor is served in ",
                   kernels::WireFormats()[static_cast<size_t>(t.serving_format)].name,
                   ", which has scales; begin and end on multiples of ", spec.chunk_elements,
                   " (RunPlan.chunk_elements), or choose a serving format without scales, such as bf16"));
}

// The entries by tensor; nullptr: the tensor is not named.
absl::StatusOr<std::vector<const v1::TensorCoverage*>> ByTensor(const Coverages& coverage, const RunSpec& spec,
                                                                absl::string_view message) {
  std::vector<const v1::TensorCoverage*> by_tensor(spec.tensors.size());
  for (const v1::TensorCoverage& covered : coverage) {
    if (covered.tensor() >= spec.tensors.size()) {
      return absl::InvalidArgumentError(absl::StrCat(message, " names tensor ", covered.tensor(), ", but the run has ",
                                                     spec.tensors.size(), " tensors"));
    }
    const v1::TensorCoverage*& place = by_tensor[covered.tensor()];
    if (place != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(message, " has tensor '", spec.tensors[covered.tensor()].name, "' twice"));
    }
    place = &covered;
  }
  return by_tensor;
}

}  // namespace

absl::StatusOr<Coverage> ToCoverage(const v1::AttachRequest& request, const RunSpec& spec,
                                    const ChunkSet::Starts& starts) {
  if (request.coverage_size() == 0) return Coverage{};
  constexpr absl::string_view kMessage = "coverage";
  ASSIGN_OR_RETURN(const auto by_tensor, ByTensor(request.coverage(), spec, kMessage));
  Coverage made{.contributes = ChunkSet(starts), .receives = ChunkSet(starts)};
  for (uint32_t i = 0; i < by_tensor.size(); ++i) {
    if (by_tensor[i] == nullptr) continue;
    const TensorSpec& t = spec.tensors[i];
    ASSIGN_OR_RETURN(const Pieces contributes,
                     ToPieces(by_tensor[i]->contributes(), spec, t, {kMessage, "contributes"}));
    ASSIGN_OR_RETURN(const Pieces receives, ToReceived(by_tensor[i]->receives(), spec, t, kMessage, /*served=*/true));
    made.contributes.Assign(i, contributes.chunks, contributes.parts);
    made.receives.Assign(i, receives.chunks, receives.parts);
  }
  return made;
}

absl::StatusOr<ChunkSet> ToParts(const v1::PullRequest& request, absl::Span<const StateSlot> slots, const RunSpec& spec,
                                 const ChunkSet::Starts& starts) {
  if (request.parts_size() == 0) return ChunkSet();
  constexpr absl::string_view kMessage = "PullRequest.parts";
  if (request.digests_size() > 0) {
    return absl::InvalidArgumentError(
        "PullRequest has parts and digests, which are of whole tensors and compare nothing of a part: leave one of "
        "them out");
  }
  const bool served = std::find(slots.begin(), slots.end(), StateSlot::kWeights) != slots.end();
  ASSIGN_OR_RETURN(const auto by_tensor, ByTensor(request.parts(), spec, kMessage));
  ChunkSet made(starts);
  for (uint32_t i = 0; i < by_tensor.size(); ++i) {
    if (by_tensor[i] == nullptr) continue;
    ASSIGN_OR_RETURN(const Pieces receives,
                     ToReceived(by_tensor[i]->receives(), spec, spec.tensors[i], kMessage, served));
    made.Assign(i, receives.chunks, receives.parts);
  }
  return made;
}

}  // namespace ballast
