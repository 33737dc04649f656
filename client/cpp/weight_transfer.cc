#include "client/cpp/weight_transfer.h"

#include <algorithm>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

namespace ballast {
namespace {

absl::Status CheckView(const TensorTable& tensors, const TensorView& view) {
  if (auto s = tensors.CheckIndex(view.tensor); !s.ok()) return s;
  if (view.slot == "updates") return absl::OkStatus();
  const uint64_t element_bytes = FormatBytes(view.format);
  if (element_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(view.slot, " of ", tensors.Name(view.tensor), " have format '",
                                                   view.format, "'; wanted fp32, bf16, fp16 or fp8-e5m2"));
  }
  const uint64_t wanted = tensors[view.tensor].elements * element_bytes;
  if (view.bytes.size() == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(view.slot, " of ", tensors.Name(view.tensor), ": got ",
                                                 view.bytes.size(), " bytes, wanted ", wanted, " (",
                                                 tensors[view.tensor].elements, " x ", view.format, ")"));
}

// False when the stream is broken; Finish says why.
bool SendTensor(grpc::ClientWriter<v1::LoadStateRequest>& writer, const TensorTable& tensors, const TensorView& view,
                v1::LoadStateRequest* request) {
  const size_t chunk_bytes = tensors.chunk_elements() * FormatBytes(view.format);
  const uint64_t chunks = view.slot == "updates" ? 1 : tensors[view.tensor].chunks;
  request->set_tensor(view.tensor);
  request->set_slot(view.slot);
  request->set_format(view.format);
  request->set_updates(view.updates);
  for (uint64_t k = 0; k < chunks; ++k) {
    const auto piece = view.bytes.subspan(k * chunk_bytes, chunk_bytes);
    request->set_chunk(k);
    request->set_data(piece.data(), piece.size());
    request->set_crc32c(Crc32c(piece));
    if (!writer.Write(*request)) return false;
    request->clear_session_token();
  }
  return true;
}

// Pieces come tensor by tensor in the order of their chunks, so a piece begins where the last one ended.
class Arrivals {
 public:
  // The piece's first element.
  absl::StatusOr<uint64_t> Place(const v1::Weights& weights, uint64_t element_bytes) {
    Tensor& tensor = tensors_[weights.tensor()];
    if (weights.chunk() == 0) tensor = {};
    if (weights.chunk() != tensor.chunks) {
      return absl::InternalError(absl::StrCat("pull of tensor ", weights.tensor(), ": got chunk ", weights.chunk(),
                                              ", wanted ", tensor.chunks));
    }
    const uint64_t first = tensor.elements;
    ++tensor.chunks;
    tensor.elements += weights.data().size() / element_bytes;
    tensor.whole = weights.last();
    return first;
  }
  bool whole(uint32_t tensor) const {
    const auto found = tensors_.find(tensor);
    return found != tensors_.end() && found->second.whole;
  }

 private:
  struct Tensor {
    uint64_t chunks = 0;
    uint64_t elements = 0;
    bool whole = false;
  };
  std::unordered_map<uint32_t, Tensor> tensors_;
};

absl::Status Deliver(const v1::Weights& weights, Arrivals* arrivals, const ServedSink& sink) {
  if (Crc32c(BytesOf(weights.data())) != weights.crc32c()) {
    return absl::DataLossError(
        absl::StrCat("pull of tensor ", weights.tensor(), ": chunk ", weights.chunk(), " arrived damaged; pull again"));
  }
  const uint64_t element_bytes = FormatBytes(weights.format());
  if (element_bytes == 0) {
    return absl::UnimplementedError(absl::StrCat("pull of tensor ", weights.tensor(), ": it is served in '",
                                                 weights.format(), "', which this client does not know: update it"));
  }
  const auto first = arrivals->Place(weights, element_bytes);
  if (!first.ok()) return first.status();
  return sink({.tensor = weights.tensor(),
               .step = weights.step(),
               .first = *first,
               .format = weights.format(),
               .codes = BytesOf(weights.data()),
               .scales = weights.scales()});
}

}  // namespace

absl::Status Decode(const ServedPiece& piece, const WireTensor& tensor, std::byte* out) {
  return DecodeWeights({.format = piece.format,
                        .first = piece.first,
                        .row_length = tensor.row_length,
                        .codes = piece.codes,
                        .scales = piece.scales},
                       tensor.landing(), out);
}

absl::StatusOr<std::vector<uint64_t>> UploadWeights(Connection& connection, const TensorTable& tensors,
                                                    const std::string& token, absl::Span<const TensorView> views) {
  for (const TensorView& view : views) {
    if (auto s = CheckView(tensors, view); !s.ok()) return s;
  }
  grpc::ClientContext context;
  v1::LoadStateResponse response;
  const auto writer = connection.trainer().LoadState(&context, &response);
  v1::LoadStateRequest request;
  request.set_session_token(token);
  const bool sent = std::all_of(views.begin(), views.end(),
                                [&](const TensorView& view) { return SendTensor(*writer, tensors, view, &request); });
  if (sent) writer->WritesDone();
  if (auto s = connection.Explain(writer->Finish()); !s.ok()) return s;
  return std::vector<uint64_t>(response.digests().begin(), response.digests().end());
}

absl::Status PullWeights(Connection& connection, const v1::PullRequest& request, const ServedSink& sink) {
  grpc::ClientContext context;
  const auto reader = connection.trainer().Pull(&context, request);
  Arrivals arrivals;
  absl::Status refused;
  v1::Weights weights;
  while (refused.ok() && reader->Read(&weights)) refused = Deliver(weights, &arrivals, sink);
  if (!refused.ok()) {
    context.TryCancel();
    while (reader->Read(&weights)) continue;
  }
  const grpc::Status status = reader->Finish();
  if (!refused.ok()) return refused;
  if (!status.ok()) return connection.Explain(status);
  for (const uint32_t tensor : request.tensors()) {
    if (!arrivals.whole(tensor)) {
      return absl::InternalError(absl::StrCat("pull of tensor ", tensor, ": the daemon ended it unfinished"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast
