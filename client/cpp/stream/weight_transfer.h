// Transfers of weights and state outside of steps: uploads, and pulls at any time, over as many connections as it
// takes. Thread-safe.
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
#include "client/cpp/stream/load_writer.h"
#include "client/cpp/stream/step_stream.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

// Uploads all weights in the stream's session. After a lost connection it begins anew, for as long as the session is
// resumed and each attempt comes further than those before. Returns the digests of what the daemon serves then.
// options.takes_batches: as the Attach of the session said. `sent`: as in Client::LoadWeights.
absl::StatusOr<std::vector<uint64_t>> UploadWeights(Connection& connection, StepStream& stream,
                                                    LoadWriter::Options options, absl::Span<const TensorView> views,
                                                    const std::function<void(uint64_t)>& sent);

using PieceSink = std::function<absl::Status(uint32_t tensor, uint64_t offset_bytes, absl::Span<const std::byte> piece,
                                             uint64_t step)>;
// Gets pieces that are checked, in formats that FindFormat knows.
using ServedSink = std::function<absl::Status(const ServedPiece&)>;
// Pulls weights, or the slots that the request names. After a lost connection it goes on with the tensor that it was
// at. `shards`: of the tensors, where the request has parts; nullptr: it has none. UNIMPLEMENTED: the daemon does not
// know parts.
absl::Status PullWeights(Connection& connection, const v1::PullRequest& request, const TensorTable* shards,
                         const ServedSink& sink);

// Decodes a piece into the tensor's landing format, which is not the serving format.
absl::Status Decode(const ServedPiece& piece, const WireTensor& tensor, std::byte* out);

}  // namespace ballast
