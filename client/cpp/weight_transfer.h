// Weights outside the steps: uploaded before the first, pulled at any time. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "client/cpp/client.h"
#include "client/cpp/connection.h"
#include "client/cpp/tensor_table.h"

namespace ballast {

absl::StatusOr<std::vector<uint64_t>> UploadWeights(Connection& connection, const TensorTable& tensors,
                                                    const std::string& token, absl::Span<const TensorView> views);

using PieceSink = std::function<absl::Status(uint32_t tensor, uint64_t offset_bytes, absl::Span<const std::byte> piece,
                                             uint64_t step)>;
// Checked, and of formats that FindFormat knows.
using ServedSink = std::function<absl::Status(const ServedPiece&)>;
absl::Status PullWeights(Connection& connection, const v1::PullRequest& request, const ServedSink& sink);

// A piece in the tensor's landing format, which is not the serving format.
absl::Status Decode(const ServedPiece& piece, const WireTensor& tensor, std::byte* out);

}  // namespace ballast
