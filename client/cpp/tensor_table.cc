#include "client/cpp/tensor_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

uint64_t FormatBytes(absl::string_view format) {
  if (format == "fp32") return 4;
  if (format == "bf16" || format == "fp16") return 2;
  return 0;
}

absl::StatusOr<TensorTable> TensorTable::Create(const v1::RunSpec& spec, uint64_t chunk_elements) {
  if (chunk_elements == 0) return absl::InternalError("the daemon announced chunks of 0 elements");
  TensorTable table;
  table.chunk_elements_ = chunk_elements;
  table.groups_ = static_cast<size_t>(spec.groups_size());
  for (const v1::TensorSpec& tensor : spec.tensors()) {
    WireTensor wire;
    wire.name = tensor.name();
    wire.dtype = tensor.dtype();
    wire.elements = 1;
    for (const int64_t extent : tensor.shape()) wire.elements *= static_cast<uint64_t>(extent);
    wire.chunks = std::max<uint64_t>(1, (wire.elements + chunk_elements - 1) / chunk_elements);
    const int group = static_cast<int>(tensor.group());
    if (group < spec.groups_size()) wire.serving = spec.groups(group).serving();
    if (wire.serving.empty()) wire.serving = wire.dtype;
    wire.dtype_bytes = FormatBytes(wire.dtype);
    wire.serving_bytes = FormatBytes(wire.serving);
    if (wire.dtype_bytes == 0 || wire.serving_bytes == 0) {
      return absl::UnimplementedError(absl::StrCat("tensor '", wire.name, "' has dtype '", wire.dtype,
                                                   "' and serving format '", wire.serving,
                                                   "'; this client knows fp32, bf16 and fp16: update it"));
    }
    table.tensors_.push_back(std::move(wire));
  }
  return table;
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
