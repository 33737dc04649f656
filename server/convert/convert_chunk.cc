// Payload messages: gradients, and uploaded weights and state.
#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/batch.h"
#include "proto/checksum.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

struct ChunkName {
  uint32_t tensor = 0;
  uint64_t chunk = 0;
};

std::string NameOf(const RunSpec& spec, ChunkName c) {
  return StrCat("chunk ", c.chunk, " of tensor ", c.tensor, " '", spec.tensors[c.tensor].name, "'");
}

absl::Status CheckTensor(const RunSpec& spec, uint32_t tensor) {
  if (tensor < spec.tensors.size()) return absl::OkStatus();
  return InvalidArgumentError(StrCat("tensor ", tensor, ": the run has ", spec.tensors.size(),
                                     " tensors, numbered from 0 in the order of its spec"));
}

absl::Status CheckChunk(const RunSpec& spec, ChunkName c) {
  const uint64_t count = ChunkCount(spec, spec.tensors[c.tensor]);
  if (c.chunk < count) return absl::OkStatus();
  return InvalidArgumentError(StrCat(NameOf(spec, c), ": it has ", count, " chunks of ", spec.chunk_elements,
                                     " elements (AttachResponse.chunk_elements), numbered from 0"));
}

absl::Status CheckSize(const RunSpec& spec, ChunkName c, kernels::WireIndex format, size_t got) {
  const TensorSpec& t = spec.tensors[c.tensor];
  const uint64_t elements = ChunkEnd(spec, t, c.chunk) - ChunkBegin(spec, c.chunk);
  const uint64_t wanted = elements * WireBytes(format);
  if (got == wanted) return absl::OkStatus();
  return InvalidArgumentError(StrCat(NameOf(spec, c), " has ", got, " bytes; wanted: ", wanted, " (", elements,
                                     " elements of ", kernels::WireFormats()[static_cast<size_t>(format)].name, ")"));
}

// A rank that contributes to part of the chunk sends that part.
absl::Status CheckPartSize(const RunSpec& spec, ChunkName c, kernels::WireIndex format, size_t got) {
  const TensorSpec& t = spec.tensors[c.tensor];
  const uint64_t elements = ChunkEnd(spec, t, c.chunk) - ChunkBegin(spec, c.chunk), bytes = WireBytes(format);
  if (got > 0 && got <= elements * bytes && got % bytes == 0) return absl::OkStatus();
  return CheckSize(spec, c, format, got);
}

absl::Status CheckFormat(const v1::Gradient& g, const RunSpec& spec) {
  const absl::string_view wanted =
      kernels::WireFormats()[static_cast<size_t>(spec.tensors[g.tensor()].gradient_format)].name;
  const ChunkName name{g.tensor(), g.chunk()};
  if (g.format() != wanted) {
    return InvalidArgumentError(StrCat(NameOf(spec, name), " has the format '", g.format(), "'; wanted: ", wanted,
                                       ", the format of the tensor's gradients"));
  }
  if (g.scale() != 0 && g.scale() != 1) {
    return InvalidArgumentError(StrCat(NameOf(spec, name), " has the scale ", g.scale(), "; wanted: 0 or 1 for ",
                                       wanted, "; scale the loss with StepBegin.loss_scale"));
  }
  return absl::OkStatus();
}

absl::StatusOr<kernels::PlaneKind> ToKind(const std::string& slot, const RunSpec& spec, ChunkName name) {
  if (slot.empty() || slot == "weights") return kernels::PlaneKind::kWeights;
  const bool momentum = slot == "momentum";
  if (!momentum && slot != "variance") {
    return InvalidArgumentError(
        StrCat(NameOf(spec, name), ": the slot is '", slot, "'; there are weights, momentum, variance and updates"));
  }
  const kernels::PlaneKind kind = momentum ? kernels::PlaneKind::kMomentum : kernels::PlaneKind::kVariance;
  if (StateCodec(spec, name.tensor, kind) != nullptr) return kind;
  const kernels::Kernel& kernel = *spec.groups[spec.tensors[name.tensor].group].kernel;
  return InvalidArgumentError(StrCat(NameOf(spec, name), ": ", kernel.rule, " with state ", kernel.state, " has no ",
                                     slot, " that can be loaded"));
}

absl::StatusOr<LoadChunk> ToUpdates(const v1::LoadStateRequest& request, const RunSpec& spec) {
  const ChunkName name{request.tensor(), request.chunk()};
  constexpr uint64_t kMost = uint64_t{1} << 53;  // steps are counted in double too
  if (request.chunk() != 0 || !request.data().empty()) {
    return InvalidArgumentError(StrCat(NameOf(spec, name), ": the slot updates is one chunk without data"));
  }
  if (request.updates() > kMost) {
    return InvalidArgumentError(
        StrCat(NameOf(spec, name), ": updates is ", request.updates(), ", wanted at most ", kMost));
  }
  return LoadChunk{.tensor = name.tensor, .updates = request.updates()};
}

absl::StatusOr<LoadChunk> ToLoadChunk(v1::LoadStateRequest* request, const RunSpec& spec) {
  const ChunkName name{request->tensor(), request->chunk()};
  RETURN_IF_ERROR(CheckTensor(spec, name.tensor));
  RETURN_IF_ERROR(CheckChunk(spec, name));
  if (request->slot() == "updates") return ToUpdates(*request, spec);
  ASSIGN_OR_RETURN(const kernels::PlaneKind kind, ToKind(request->slot(), spec, name));
  ASSIGN_OR_RETURN(const kernels::WireIndex format, ToWireFormat(request->format(), &kernels::WireFormat::gradient,
                                                                 NameOf(spec, name) + ": the format"));
  RETURN_IF_ERROR(CheckSize(spec, name, format, request->data().size()));
  const uint32_t crc = Crc32c({reinterpret_cast<const std::byte*>(request->data().data()), request->data().size()});
  if (crc != request->crc32c()) {
    return absl::DataLossError(StrCat(NameOf(spec, name), ": crc32c of the data is ", crc, ", the message says ",
                                      request->crc32c(), "; send it again"));
  }
  return LoadChunk{.tensor = name.tensor,
                   .chunk = name.chunk,
                   .kind = kind,
                   .format = format,
                   .data = std::move(*request->mutable_data())};
}

}  // namespace

absl::Status CheckGradient(const v1::Gradient& g, uint64_t payload_bytes, const RunSpec& spec,
                           absl::string_view* reason) {
  *reason = "unknown_tensor";
  RETURN_IF_ERROR(CheckTensor(spec, g.tensor()));
  *reason = "bounds";
  RETURN_IF_ERROR(CheckChunk(spec, {g.tensor(), g.chunk()}));
  *reason = "malformed";
  RETURN_IF_ERROR(CheckFormat(g, spec));
  return CheckPartSize(spec, {g.tensor(), g.chunk()}, spec.tensors[g.tensor()].gradient_format, payload_bytes);
}

absl::Status CheckSmallGradients(const v1::SmallGradients& g) {
  const int count = g.tensors_size();
  if (count == 0 || count > kMostBatchMessages || g.sizes_size() != count || g.crc32c_size() != count) {
    return InvalidArgumentError(StrCat("SmallGradients of ", count, " tensors, with ", g.sizes_size(), " sizes and ",
                                       g.crc32c_size(), " checksums; wanted: as many of each, from 1 to ",
                                       kMostBatchMessages));
  }
  const uint64_t bytes = std::accumulate(g.sizes().begin(), g.sizes().end(), uint64_t{0});
  if (bytes == g.data().size() && bytes <= kMostBatchedBytes) return absl::OkStatus();
  return InvalidArgumentError(StrCat("SmallGradients with ", g.data().size(), " bytes of data, and sizes of ", bytes,
                                     " bytes together; wanted: as many, and at most ", kMostBatchedBytes));
}

absl::Status CheckSmallGradient(uint32_t tensor, uint64_t bytes, const RunSpec& spec, absl::string_view* reason) {
  *reason = "unknown_tensor";
  RETURN_IF_ERROR(CheckTensor(spec, tensor));
  *reason = "malformed";
  return CheckPartSize(spec, {tensor, 0}, spec.tensors[tensor].gradient_format, bytes);
}

absl::StatusOr<std::vector<uint32_t>> ToTensors(const v1::PullRequest& request, const RunSpec& spec) {
  const size_t count = spec.tensors.size();
  std::vector<uint32_t> tensors(request.tensors().begin(), request.tensors().end());
  if (tensors.empty()) {
    tensors.resize(count);
    std::iota(tensors.begin(), tensors.end(), 0);
  }
  for (const uint32_t tensor : tensors) {
    if (tensor < count) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor, ": run '", spec.run_id, "' has ", count,
                                                   " tensors, numbered from 0 in the order of its spec"));
  }
  return tensors;
}

absl::StatusOr<std::vector<StateSlot>> ToStateSlots(const v1::PullRequest& request) {
  std::vector<StateSlot> slots;
  for (const std::string& name : request.slots()) {
    const auto slot = FindStateSlot(name);
    if (!slot) {
      return InvalidArgumentError(
          StrCat("PullRequest.slots: '", name, "'; there are ", absl::StrJoin(kStateSlotNames, ", ")));
    }
    if (std::find(slots.begin(), slots.end(), *slot) != slots.end()) {
      return InvalidArgumentError(StrCat("PullRequest.slots: '", name, "' twice; name each once"));
    }
    slots.push_back(*slot);
  }
  if (slots.empty()) slots.push_back(StateSlot::kWeights);
  return slots;
}

absl::StatusOr<std::vector<LoadChunk>> ToLoadChunks(v1::LoadStateRequest* request, const RunSpec& spec) {
  std::vector<LoadChunk> chunks;
  if (request->batch_size() > kMostBatchMessages) {
    return InvalidArgumentError(
        StrCat("a batch of ", request->batch_size(), " messages, wanted at most ", kMostBatchMessages));
  }
  for (v1::LoadStateRequest& one : *request->mutable_batch()) {
    if (one.batch_size() > 0)
      return InvalidArgumentError("a batch in a batch of LoadState; put its messages beside it");
    ASSIGN_OR_RETURN(LoadChunk chunk, ToLoadChunk(&one, spec));
    chunks.push_back(std::move(chunk));
  }
  if (!chunks.empty()) return chunks;
  ASSIGN_OR_RETURN(LoadChunk chunk, ToLoadChunk(request, spec));
  chunks.push_back(std::move(chunk));
  return chunks;
}

}  // namespace ballast
