#include "client/cpp/parts/part_placement.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

uint64_t Elements(const v1::TensorSpec& tensor) {
  uint64_t elements = 1;
  for (const int64_t size : tensor.shape()) elements *= static_cast<uint64_t>(std::max<int64_t>(size, 0));
  return elements;
}

absl::Status NoParts(const v1::RunSpec& spec, uint32_t part, uint32_t count) {
  const std::string has =
      !spec.has_part() ? "has all of it" : absl::StrCat("has part ", spec.part().index(), " of ", spec.part().count());
  return absl::FailedPreconditionError(
      absl::StrCat("daemon ", part, " of the ", count, " that are named ", has, ", run '", spec.run_id(),
                   "': name the daemons that the run was created on, all of them, in the same order"));
}

}  // namespace

absl::StatusOr<PartPlacement> PartPlacement::Of(const v1::RunSpec& whole, uint32_t parts) {
  if (static_cast<uint32_t>(whole.tensors_size()) < parts) {
    return absl::InvalidArgumentError(absl::StrCat("run '", whole.run_id(), "' has ", whole.tensors_size(),
                                                   " tensors, and ", parts,
                                                   " daemons are named, each of which would "
                                                   "have whole ones: name fewer"));
  }
  PartPlacement placement;
  placement.numbers_.resize(parts);
  placement.PlaceFrom(whole, 0);
  return placement;
}

absl::StatusOr<PartPlacement> PartPlacement::OfParts(absl::Span<const v1::RunSpec> parts) {
  PartPlacement placement;
  const auto count = static_cast<uint32_t>(parts.size());
  uint32_t tensors = 0;
  for (uint32_t part = 0; part < count; ++part) {
    const v1::RunPart& is = parts[part].part();
    if (!parts[part].has_part() || is.index() != part || is.count() != count) {
      return NoParts(parts[part], part, count);
    }
    placement.numbers_.emplace_back(is.tensors().begin(), is.tensors().end());
    tensors += static_cast<uint32_t>(is.tensors_size());
  }
  placement.places_.resize(tensors);
  std::vector<bool> placed(tensors);
  for (uint32_t part = 0; part < count; ++part) {
    const bool fits = parts[part].part().whole_tensors() == tensors;
    for (const uint32_t tensor : placement.numbers_[part]) {
      if (fits && tensor < tensors && !placed[tensor]) {
        placed[tensor] = true;
        continue;
      }
      return absl::FailedPreconditionError(
          absl::StrCat("the parts of run '", parts[part].run_id(), "' do not make up one run (daemon ", part,
                       "): it was amended on some of its daemons alone. Amend it again"));
    }
  }
  placement.Number();
  return placement;
}

absl::StatusOr<PartPlacement> PartPlacement::Extended(const v1::RunSpec& whole) const {
  if (static_cast<uint32_t>(whole.tensors_size()) < tensors()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run '", whole.run_id(), "' exists with another spec: it has ", tensors(), " tensors, asked for is ",
        whole.tensors_size(), ". A run keeps its tensors: name all of them, or use another run"));
  }
  PartPlacement placement = *this;
  placement.PlaceFrom(whole, tensors());
  return placement;
}

// The largest first, each to the part that has the least.
void PartPlacement::PlaceFrom(const v1::RunSpec& whole, uint32_t first) {
  std::vector<uint32_t> order(static_cast<uint32_t>(whole.tensors_size()) - first);
  std::iota(order.begin(), order.end(), first);
  const auto elements = [&](uint32_t tensor) { return Elements(whole.tensors(static_cast<int>(tensor))); };
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return elements(a) > elements(b); });
  std::vector<uint64_t> sizes(numbers_.size());
  for (uint32_t part = 0; part < parts(); ++part) {
    for (const uint32_t tensor : numbers_[part]) sizes[part] += elements(tensor);
  }
  for (const uint32_t tensor : order) {
    const auto least = std::min_element(sizes.begin(), sizes.end()) - sizes.begin();
    sizes[static_cast<size_t>(least)] += elements(tensor);
    numbers_[static_cast<size_t>(least)].push_back(tensor);
  }
  for (std::vector<uint32_t>& numbers : numbers_) std::sort(numbers.begin(), numbers.end());
  Number();
}

void PartPlacement::Number() {
  size_t tensors = 0;
  for (const std::vector<uint32_t>& numbers : numbers_) tensors += numbers.size();
  places_.resize(tensors);
  for (uint32_t part = 0; part < parts(); ++part) {
    for (uint32_t i = 0; i < numbers_[part].size(); ++i) places_[numbers_[part][i]] = {part, i};
  }
}

std::vector<v1::RunSpec> PartPlacement::Split(v1::RunSpec whole) const {
  google::protobuf::RepeatedPtrField<v1::TensorSpec> tensors;
  whole.mutable_tensors()->Swap(&tensors);
  std::vector<v1::RunSpec> specs(parts(), whole);
  for (uint32_t part = 0; part < parts(); ++part) {
    v1::RunPart* mine = specs[part].mutable_part();
    mine->set_index(part);
    mine->set_count(parts());
    mine->set_whole_tensors(this->tensors());
    mine->mutable_tensors()->Assign(numbers_[part].begin(), numbers_[part].end());
    for (const uint32_t tensor : numbers_[part]) {
      *specs[part].add_tensors() = std::move(tensors[static_cast<int>(tensor)]);
    }
  }
  return specs;
}

v1::RunSpec PartPlacement::WholeOf(absl::Span<const v1::RunSpec> parts) const {
  v1::RunSpec whole = parts[0];
  whole.clear_part();
  whole.clear_tensors();
  for (const Place& place : places_) *whole.add_tensors() = parts[place.part].tensors(static_cast<int>(place.index));
  return whole;
}

}  // namespace ballast
