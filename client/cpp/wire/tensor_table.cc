#include "client/cpp/wire/tensor_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

namespace {

const v1::GroupSpec& GroupOf(const v1::RunSpec& spec, const v1::TensorSpec& tensor) {
  const int group = static_cast<int>(tensor.group());
  return group < spec.groups_size() ? spec.groups(group) : v1::GroupSpec::default_instance();
}

// As the daemon counts rows: the last dimension; a tensor of one dimension, or of rows of one element, is one row.
uint64_t RowLength(const v1::TensorSpec& tensor, uint64_t elements, Scaling scaling) {
  if (scaling == Scaling::kNone) return 0;
  const int last = tensor.shape_size() - 1;
  const bool rows = scaling == Scaling::kRow && last > 0 && tensor.shape(last) > 1;
  return rows ? static_cast<uint64_t>(tensor.shape(last)) : elements;
}

absl::StatusOr<WireTensor> Describe(const v1::RunSpec& spec, const v1::TensorSpec& tensor, uint64_t chunk_elements) {
  const std::string& gradient = GroupOf(spec, tensor).gradient();
  WireTensor wire;
  wire.name = tensor.name();
  wire.elements = 1;
  for (const int64_t extent : tensor.shape()) wire.elements *= static_cast<uint64_t>(extent);
  wire.chunks = std::max<uint64_t>(1, (wire.elements + chunk_elements - 1) / chunk_elements);
  wire.dtype = tensor.dtype();
  wire.gradient = gradient.empty() ? wire.dtype : gradient;
  wire.serving = ServingFormat(spec, tensor);
  wire.gradient_element_bytes = FormatBytes(wire.gradient);
  wire.serving_element_bytes = FormatBytes(wire.serving);
  const WireFormat* dtype = FindFormat(wire.dtype);
  if (dtype == nullptr || !dtype->computes || wire.gradient_element_bytes == 0 || wire.serving_element_bytes == 0) {
    return absl::UnimplementedError(absl::StrCat("tensor '", wire.name, "' has dtype '", wire.dtype,
                                                 "', gradients in '", wire.gradient, "' and serving format '",
                                                 wire.serving, "', which this client does not know: update it"));
  }
  wire.row_length = RowLength(tensor, wire.elements, FindFormat(wire.serving)->scaling);
  wire.shard = {.begin = 0, .end = wire.elements};
  wire.end_chunk = wire.chunks;
  return wire;
}

absl::Status Take(const Shard& shard, uint64_t chunk_elements, WireTensor* wire) {
  if (shard.begin > shard.end || shard.end > wire->elements) {
    return absl::InvalidArgumentError(absl::StrCat("shards: [", shard.begin, ", ", shard.end, ") of tensor '",
                                                   wire->name, "', which has ", wire->elements,
                                                   " elements; wanted 0 <= begin <= end <= that"));
  }
  const bool some = shard.begin < shard.end;
  wire->shard = {.begin = shard.begin, .end = shard.end, .contributes = shard.contributes && some};
  wire->first_chunk = shard.begin / chunk_elements;
  wire->end_chunk = some ? (shard.end - 1) / chunk_elements + 1 : wire->first_chunk;
  return absl::OkStatus();
}

}  // namespace

const std::string& ServingFormat(const v1::RunSpec& spec, const v1::TensorSpec& tensor) {
  const std::string& serving = GroupOf(spec, tensor).serving();
  return serving.empty() ? tensor.dtype() : serving;
}

absl::StatusOr<TensorTable> TensorTable::Create(const v1::RunSpec& spec, uint64_t chunk_elements,
                                                const Shards& shards) {
  if (!shards.empty() && shards.size() != static_cast<size_t>(spec.tensors_size())) {
    return absl::InvalidArgumentError(absl::StrCat("shards: got ", shards.size(), ", wanted one for each of the run's ",
                                                   spec.tensors_size(), " tensors, or none"));
  }
  if (chunk_elements == 0) return absl::InternalError("the daemon announced chunks of 0 elements");
  TensorTable table;
  table.chunk_elements_ = chunk_elements;
  table.staged_ = spec.commit() == v1::COMMIT_MODE_STAGED;
  table.limits_ = StepLimits(spec);
  for (const v1::TensorSpec& tensor : spec.tensors()) {
    auto wire = Describe(spec, tensor, chunk_elements);
    if (!wire.ok()) return wire.status();
    if (!shards.empty() && shards[table.size()]) {
      if (auto s = Take(*shards[table.size()], chunk_elements, &*wire); !s.ok()) return s;
    }
    table.tensors_.push_back(*std::move(wire));
  }
  return table;
}

ShardPiece TensorTable::PieceOf(uint32_t tensor, uint64_t chunk) const {
  const Shard& shard = tensors_[tensor].shard;
  return {std::max(chunk * chunk_elements_, shard.begin), std::min((chunk + 1) * chunk_elements_, shard.end)};
}

absl::Status TensorTable::CheckIndex(uint32_t tensor) const {
  if (tensor < size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", tensor, ": the run has ", size(), " tensors, numbered from 0"));
}

std::string TensorTable::Name(uint32_t tensor) const {
  if (tensor >= size()) return absl::StrCat("tensor ", tensor);
  return absl::StrCat("tensor ", tensor, " '", tensors_[tensor].name, "'");
}

}  // namespace ballast
