#include "client/cpp/stream/weight_transfer.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/checksum.h"
#include "proto/utf8.h"

#include "client/cpp/transport/retry.h"

namespace ballast {
namespace {

absl::Status CheckView(const TensorTable& tensors, const TensorView& view) {
  if (auto s = tensors.CheckIndex(view.tensor); !s.ok()) return s;
  if (view.slot == "updates") return absl::OkStatus();
  v1::LoadStateRequest named;
  named.set_slot(view.slot);
  if (auto s = CheckText(named); !s.ok()) return s;
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

// Tells how much of an upload has been written.
class SentBytes {
 public:
  explicit SentBytes(const std::function<void(uint64_t)>& tell) : tell_(tell) {}
  void Add(uint64_t bytes) {
    bytes_ += bytes;
    if (tell_) tell_(bytes_);
  }

 private:
  const std::function<void(uint64_t)>& tell_;
  uint64_t bytes_ = 0;
};

// False when the stream is broken; Finish says why.
bool SendTensor(LoadWriter* writer, const TensorTable& tensors, const TensorView& view, SentBytes* sent) {
  const size_t chunk_bytes = tensors.chunk_elements() * FormatBytes(view.format);
  const uint64_t chunks = view.slot == "updates" ? 1 : tensors[view.tensor].chunks;
  for (uint64_t k = 0; k < chunks; ++k) {
    const auto piece = view.bytes.subspan(k * chunk_bytes, chunk_bytes);
    v1::LoadStateRequest request;
    request.set_tensor(view.tensor);
    request.set_slot(view.slot);
    request.set_format(view.format);
    request.set_updates(view.updates);
    request.set_chunk(k);
    request.set_data(piece.data(), piece.size());
    request.set_crc32c(Crc32c(piece));
    if (!writer->Write(std::move(request))) return false;
    sent->Add(piece.size());
  }
  return true;
}

const std::string& SlotOf(const v1::Weights& weights) {
  static const std::string kWeights = "weights";
  return weights.slot().empty() ? kWeights : weights.slot();
}

// Pieces come tensor by tensor, slot by slot, in the order of their chunks, so a piece begins where the last one ended.
class Arrivals {
 public:
  // shards: as in PullWeights.
  explicit Arrivals(const TensorTable* shards) : shards_(shards) {}

  // The piece's first element.
  absl::StatusOr<uint64_t> Place(const v1::Weights& weights, uint64_t element_bytes) {
    Tensor& tensor = tensors_[weights.tensor()];
    const std::string& slot = SlotOf(weights);
    if (auto s = CheckPart(weights, slot, element_bytes); !s.ok()) return s;
    const WireTensor* const wire = PartOf(weights.tensor(), slot);
    const uint64_t begin = wire == nullptr ? 0 : wire->first_chunk;
    if (weights.chunk() == begin && (tensor.messages == 0 || slot == tensor.first_slot)) {
      tensor = {.first_slot = slot, .slot = slot, .chunks = begin, .furthest = tensor.furthest};
    } else if (weights.chunk() == begin) {
      tensor.slot = slot;
      tensor.chunks = begin;
      tensor.elements = 0;
    }
    if (weights.chunk() != tensor.chunks || slot != tensor.slot) {
      return absl::InternalError(absl::StrCat("pull of tensor ", weights.tensor(), ": got chunk ", weights.chunk(),
                                              " of its ", slot, ", wanted ", tensor.chunks, " of its ", tensor.slot));
    }
    const uint64_t first = tensor.elements + (wire == nullptr ? 0 : wire->shard.begin);
    ++tensor.chunks;
    ++tensor.messages;
    tensor.elements += weights.data().size() / element_bytes;
    tensor.whole = weights.last();
    if (tensor.messages > tensor.furthest) {
      tensor.furthest = tensor.messages;
      ++new_chunks_;
    }
    return first;
  }
  // Those of the `wanted` tensors that are not whole; a tensor that came in part begins anew. `or_none`: leaves out
  // tensors of which nothing came.
  std::vector<uint32_t> Missing(absl::Span<const uint32_t> wanted, bool or_none) const {
    std::vector<uint32_t> missing;
    std::copy_if(wanted.begin(), wanted.end(), std::back_inserter(missing),
                 [&](uint32_t tensor) { return !whole(tensor, or_none); });
    return missing;
  }
  // Whether all of the tensor came. `or_none`: or nothing of it.
  bool whole(uint32_t tensor, bool or_none) const {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) return or_none;
    return found->second.whole;
  }
  // Whether part of it came, so that the caller no longer has the weights that it had.
  bool in_part(uint32_t tensor) const { return !whole(tensor, /*or_none=*/true); }
  // Counts pieces that came further than any before them of the same tensor.
  uint64_t new_chunks() const { return new_chunks_; }

 private:
  struct Tensor {
    std::string first_slot, slot;  // the first that came, and the one that comes
    uint64_t chunks = 0;           // the next of that one
    uint64_t elements = 0;         // likewise
    uint64_t messages = 0;         // of all slots
    uint64_t furthest = 0;         // the most of them, also of earlier attempts
    bool whole = false;
  };

  // The tensor, where only part of it is asked for; else nullptr. The slot "updates" is of all of it.
  const WireTensor* PartOf(uint32_t tensor, const std::string& slot) const {
    if (shards_ == nullptr || tensor >= shards_->size() || slot == "updates") return nullptr;
    return (*shards_)[tensor].whole() ? nullptr : &(*shards_)[tensor];
  }
  // A daemon that does not know PullRequest.parts sends all of a tensor.
  absl::Status CheckPart(const v1::Weights& weights, const std::string& slot, uint64_t element_bytes) const {
    const WireTensor* const wire = PartOf(weights.tensor(), slot);
    if (wire == nullptr) return absl::OkStatus();
    const uint64_t chunk = weights.chunk();
    const bool held = chunk >= wire->first_chunk && chunk < wire->end_chunk;
    const uint64_t wanted = held ? shards_->PieceOf(weights.tensor(), chunk).size() * element_bytes : 0;
    if (held && weights.data().size() == wanted) return absl::OkStatus();
    return absl::UnimplementedError(
        absl::StrCat("pull of ", shards_->Name(weights.tensor()), ", elements [", wire->shard.begin, ", ",
                     wire->shard.end, "): got ", weights.data().size(), " bytes of chunk ", chunk, ", wanted ", wanted,
                     ": this daemon is older than the client and sends whole tensors; update it"));
  }

  const TensorTable* const shards_;
  std::unordered_map<uint32_t, Tensor> tensors_;
  uint64_t new_chunks_ = 0;
};

// A daemon that does not know PullRequest.slots sends weights whatever they are.
absl::Status CheckSlot(const v1::Weights& weights, const v1::PullRequest& request) {
  const auto& slots = request.slots();
  const std::string& slot = SlotOf(weights);
  if (slots.empty() ? slot == "weights" : std::find(slots.begin(), slots.end(), slot) != slots.end()) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(absl::StrCat("pull of tensor ", weights.tensor(), ": asked for ",
                                               absl::StrJoin(slots, ", "), ", and got ", slot,
                                               ": this daemon is older than the client; update it"));
}

// Nor one that does not know PullRequest.average.
absl::Status CheckAverage(const v1::Weights& weights, const v1::PullRequest& request) {
  if (weights.average() == request.average()) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("pull of tensor ", weights.tensor(),
                                               ": asked for the average with decay ", request.average(),
                                               ", and got the weights: this daemon is older than the "
                                               "client; update it"));
}

absl::Status Deliver(const v1::Weights& weights, const v1::PullRequest& request, Arrivals* arrivals,
                     const ServedSink& sink) {
  if (auto s = CheckSlot(weights, request); !s.ok()) return s;
  if (auto s = CheckAverage(weights, request); !s.ok()) return s;
  if (Crc32c(BytesOf(weights.data())) != weights.crc32c()) {
    return absl::DataLossError(
        absl::StrCat("pull of tensor ", weights.tensor(), ": chunk ", weights.chunk(), " arrived damaged; pull again"));
  }
  const bool counts = weights.slot() == "updates";
  const uint64_t element_bytes = counts ? 1 : FormatBytes(weights.format());
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
               .scales = weights.scales(),
               .slot = SlotOf(weights),
               .updates = weights.updates()});
}

using Digests = std::vector<uint64_t>;

absl::StatusOr<Digests> UploadOnce(Connection& connection, const StepStream& stream, const LoadWriter::Options& options,
                                   absl::Span<const TensorView> views, const std::function<void(uint64_t)>& tell,
                                   uint64_t* messages) {
  grpc::ClientContext context;
  v1::LoadStateResponse response;
  const auto call = connection.trainer().LoadState(&context, &response);
  LoadWriter writer(call.get(), stream.token(), options);
  SentBytes bytes(tell);
  const bool sent = std::all_of(views.begin(), views.end(), [&](const TensorView& view) {
    return SendTensor(&writer, stream.tensors(), view, &bytes);
  });
  if (sent && writer.Flush()) call->WritesDone();
  *messages = writer.sent();
  if (auto s = FromGrpc(call->Finish(), context); !s.ok()) return s;
  return Digests(response.digests().begin(), response.digests().end());
}

// *refused: why the pull ended on this side.
absl::Status PullOnce(Connection& connection, const v1::PullRequest& request, Arrivals* arrivals,
                      const ServedSink& sink, absl::Status* refused) {
  grpc::ClientContext context;
  v1::PullRequest asked = request;
  asked.set_takes_batches(true);
  const auto reader = connection.trainer().Pull(&context, asked);
  v1::Weights weights;
  while (refused->ok() && reader->Read(&weights)) {
    if (weights.batch().empty()) *refused = Deliver(weights, request, arrivals, sink);
    for (int i = 0; i < weights.batch_size() && refused->ok(); ++i) {
      *refused = Deliver(weights.batch(i), request, arrivals, sink);
    }
  }
  if (!refused->ok()) {
    context.TryCancel();
    while (reader->Read(&weights)) continue;
  }
  return FromGrpc(reader->Finish(), context);
}

// All tensors of the run by number, so that those that are missing can be named.
absl::StatusOr<std::vector<uint32_t>> NumbersOf(Connection& connection, const std::string& run_id) {
  v1::GetRunRequest request;
  request.set_run_id(run_id);
  v1::GetRunResponse run;
  const absl::Status status = connection.Call(connection.admin(), &v1::AdminService::Stub::GetRun, request, &run);
  if (!status.ok()) return status;
  std::vector<uint32_t> numbers(static_cast<size_t>(run.spec().tensors_size()));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// The same request for only the tensors that are missing, in the order of `wanted`, which names all of the request's.
v1::PullRequest Rest(const v1::PullRequest& request, absl::Span<const uint32_t> wanted,
                     absl::Span<const uint32_t> missing, const Arrivals& arrivals) {
  v1::PullRequest rest = request;
  rest.mutable_tensors()->Assign(missing.begin(), missing.end());
  rest.clear_digests();
  for (size_t i = 0, next = 0; i < wanted.size() && request.digests_size() > 0; ++i) {
    if (next == missing.size() || wanted[i] != missing[next]) continue;
    const uint64_t had = request.digests(static_cast<int>(i));
    rest.add_digests(arrivals.in_part(wanted[i]) ? ~had : had);  // another than had, which may be the daemon's again
    ++next;
  }
  return rest;
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

absl::StatusOr<Digests> UploadWeights(Connection& connection, StepStream& stream, LoadWriter::Options options,
                                      absl::Span<const TensorView> views, const std::function<void(uint64_t)>& sent) {
  for (const TensorView& view : views) {
    if (auto s = CheckView(stream.tensors(), view); !s.ok()) return s;
  }
  Retry put_off(connection, "uploading weights");
  for (uint64_t furthest = 0;;) {
    uint64_t messages = 0;
    auto digests = UploadOnce(connection, stream, options, views, sent, &messages);
    if (RetryAfter(digests.status()) && put_off.Again(digests.status())) continue;
    if (digests.ok()) stream.CountAsProgress();
    if (digests.ok() || !IsLost(digests.status())) return digests;
    const auto resumed = stream.AttachAgain(/*progress=*/messages > furthest);
    if (!resumed.ok()) return resumed.status();
    // The answer alone was lost. The other ranks may have begun the first step since. Of a replacement the session's end
    // tells; what this one has loaded may be what is to be replaced.
    if (!options.replace && resumed->loaded_here()) {
      stream.CountAsProgress();
      return Digests(resumed->digests().begin(), resumed->digests().end());
    }
    options.takes_batches = resumed->takes_load_batches();
    furthest = std::max(furthest, messages);
  }
}

absl::Status PullWeights(Connection& connection, const v1::PullRequest& request, const TensorTable* shards,
                         const ServedSink& sink) {
  if (auto s = CheckText(request); !s.ok()) return s;
  Arrivals arrivals(shards);
  v1::PullRequest rest = request;
  std::vector<uint32_t> wanted(request.tensors().begin(), request.tensors().end());
  for (Retry retry(connection, absl::StrCat("pulling weights of run '", request.run_id(), "'"));;) {
    const uint64_t before = arrivals.new_chunks();
    absl::Status refused;
    absl::Status status = PullOnce(connection, rest, &arrivals, sink, &refused);
    if (!refused.ok()) return refused;
    if (status.ok()) break;
    if (arrivals.new_chunks() > before) retry.Progress();
    if (!retry.Again(status)) return retry.Explain(status);
    if (wanted.empty()) {
      if (auto all = NumbersOf(connection, request.run_id()); all.ok()) wanted = *std::move(all);
    }
    const std::vector<uint32_t> missing = arrivals.Missing(wanted, /*or_none=*/false);
    if (missing.empty() && !wanted.empty()) break;
    rest = Rest(request, wanted, missing, arrivals);
  }
  // A tensor that was compared by its digest does not come when it is the same.
  if (const auto missing = arrivals.Missing(wanted, request.digests_size() > 0); !missing.empty()) {
    return absl::InternalError(absl::StrCat("pull of tensor ", missing[0], ": the daemon ended it unfinished"));
  }
  return absl::OkStatus();
}

}  // namespace ballast
