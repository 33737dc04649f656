// AttachRequest.coverage: from the wire's ranges of elements to chunks.
#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

using Ranges = google::protobuf::RepeatedPtrField<v1::ElementRange>;

absl::StatusOr<std::vector<bool>> ToChunks(const Ranges& ranges, const RunSpec& spec, const TensorSpec& t,
                                           absl::string_view field) {
  std::vector<bool> chunks(ChunkCount(spec, t));
  const uint64_t c = spec.chunk_elements;
  uint64_t last_end = 0;
  for (const v1::ElementRange& range : ranges) {
    const auto refuse = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat("coverage of tensor '", t.name, "', ", field, " [", range.begin(),
                                                     ", ", range.end(), "): ", why));
    };
    if (range.begin() >= range.end()) return refuse("it is empty; leave it out");
    if (range.end() > t.elements) return refuse(absl::StrCat("the tensor has ", t.elements, " elements"));
    if (range.begin() < last_end) return refuse("it begins before the range ahead of it ends");
    if (range.begin() % c != 0 || (range.end() % c != 0 && range.end() != t.elements)) {
      return refuse(absl::StrCat("it must begin and end on multiples of ", c,
                                 " (RunPlan.chunk_elements), or end where "
                                 "the tensor does"));
    }
    for (uint64_t k = range.begin() / c; k * c < range.end(); ++k) chunks[k] = true;
    last_end = range.end();
  }
  return chunks;
}

}  // namespace

absl::StatusOr<Coverage> ToCoverage(const v1::AttachRequest& request, const RunSpec& spec,
                                    const ChunkSet::Starts& starts) {
  if (request.coverage_size() == 0) return Coverage{};
  Coverage made{.contributes = ChunkSet(starts), .receives = ChunkSet(starts)};
  std::vector<bool> named(spec.tensors.size());
  for (const v1::TensorCoverage& covered : request.coverage()) {
    if (covered.tensor() >= spec.tensors.size()) {
      return absl::InvalidArgumentError(absl::StrCat("coverage names tensor ", covered.tensor(), ", but the run has ",
                                                     spec.tensors.size(), " tensors"));
    }
    const TensorSpec& t = spec.tensors[covered.tensor()];
    if (named[covered.tensor()]) {
      return absl::InvalidArgumentError(absl::StrCat("coverage has tensor '", t.name, "' twice"));
    }
    named[covered.tensor()] = true;
    ASSIGN_OR_RETURN(const auto contributes, ToChunks(covered.contributes(), spec, t, "contributes"));
    ASSIGN_OR_RETURN(const auto receives, ToChunks(covered.receives(), spec, t, "receives"));
    made.contributes.Assign(covered.tensor(), contributes);
    made.receives.Assign(covered.tensor(), receives);
  }
  return made;
}

}  // namespace ballast
