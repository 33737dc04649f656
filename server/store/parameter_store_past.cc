// How a store takes the place of another. Planes that stay as they lie change hands at the end; what is stored otherwise,
// and what lies in one allocation with it, is made from the other's planes before, so that until the end nothing of the
// other has changed.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/spec/carry_over.h"
#include "server/spec/stored_planes.h"
#include "server/store/parameter_store.h"

namespace ballast {
namespace {

using kernels::PlaneKind;

constexpr PlaneKind kKinds[] = {PlaneKind::kWeights, PlaneKind::kMomentum, PlaneKind::kVariance, PlaneKind::kAverage};

// Of weights in fp32 that are about to be stored otherwise.
absl::Status CheckHeld(const TensorSpec& t, const kernels::MasterFormat& master, const std::byte* weights, uint64_t n) {
  const auto* const values = reinterpret_cast<const float*>(weights);
  const auto* const beyond = std::find_if(values, values + n, [&](float x) { return std::abs(x) > master.largest; });
  if (beyond == values + n) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor '", t.name, "' has a weight of ", *beyond, ", and ",
                                                 master.name, " holds none beyond ", master.largest));
}

}  // namespace

std::vector<std::vector<bool>> ParameterStore::StayingParts(const RunSpec& next) const {
  std::vector<std::vector<bool>> stay;
  for (const Shard& shard : shards_) stay.emplace_back(shard.parts.size(), true);
  for (uint32_t i = 0; i < spots_.size(); ++i) {
    for (const PlaneKind kind : kKinds) {
      if (CarryOverOf(KernelOf(*environment_.spec, i), KernelOf(next, i), kind) == CarryOver::kAsItLies) continue;
      stay[environment_.plan->placement.shard_of[i]][spots_[i].part] = false;
    }
  }
  return stay;
}

std::vector<bool> ParameterStore::Staying(const RunSpec& next) const {
  const std::vector<std::vector<bool>> parts = StayingParts(next);
  std::vector<bool> stay(next.tensors.size());
  for (uint32_t i = 0; i < spots_.size(); ++i) {
    stay[i] = parts[environment_.plan->placement.shard_of[i]][spots_[i].part];
  }
  return stay;
}

std::vector<uint64_t> ParameterStore::StayingBytes(const RunSpec& next) const {
  const std::vector<std::vector<bool>> parts = StayingParts(next);
  std::vector<uint64_t> bytes(shards_.size());
  for (size_t s = 0; s < shards_.size(); ++s) {
    for (size_t p = 0; p < parts[s].size(); ++p) bytes[s] += parts[s][p] ? shards_[s].parts[p].bytes() : 0;
  }
  return bytes;
}

absl::Status ParameterStore::CarryOver(const ParameterStore& past) {
  past.WaitIdle();  // what was restored to it is there
  for (uint32_t i = 0; i < past.spots_.size(); ++i) {
    for (const PlaneKind kind : kKinds) {
      if (!stays_[i]) RETURN_IF_ERROR(CarryOver(past, i, kind));
    }
  }
  return absl::OkStatus();
}

absl::Status ParameterStore::CarryOver(const ParameterStore& past, uint32_t tensor, PlaneKind kind) {
  const RunSpec& spec = *environment_.spec;
  if (CarryOverOf(KernelOf(*past.environment_.spec, tensor), KernelOf(spec, tensor), kind) == CarryOver::kAsItLies) {
    return CopyPlanes(past, tensor, kind);
  }
  if (kind == PlaneKind::kWeights) return ConvertWeights(past, tensor);
  const TensorSpec& t = spec.tensors[tensor];
  for (uint64_t k = 0; k < ChunkCount(spec, t); ++k) {
    RETURN_IF_ERROR(ConvertState(past, {tensor, ChunkBegin(spec, k), ChunkEnd(spec, t, k)}, kind));
  }
  return absl::OkStatus();
}

absl::Status ParameterStore::CopyPlanes(const ParameterStore& past, uint32_t tensor, PlaneKind kind) {
  const RunSpec &spec = *environment_.spec, &past_spec = *past.environment_.spec;
  const StoredPlanes from(past_spec, past_spec.tensors[tensor]), to(spec, spec.tensors[tensor]);
  const uint64_t elements = spec.tensors[tensor].elements;
  Device* const device = environment_.devices[environment_.plan->placement.shard_of[tensor]];
  DeviceBuffer room;  // a device copies between its memory and the host's
  for (size_t p = 0, q = 0; p < from.size(); ++p) {
    if (from[p].kind != kind) continue;
    while (to[q].kind != kind) ++q;
    const uint64_t bytes = kernels::PlaneBytes(from[p], elements);
    if (room.bytes() == 0) {
      const uint64_t most = environment_.spec->chunk_elements * sizeof(float);
      ASSIGN_OR_RETURN(room, device->Allocate(std::min(AlignUp(bytes), most), Place::kAside));
    }
    for (uint64_t begin = 0; begin < bytes; begin += room.bytes()) {
      const uint64_t n = std::min(room.bytes(), bytes - begin);
      CopyTask out, in;
      out.pieces[0] = {.to = room.data(), .from = past.PlaneAt(tensor, p) + begin, .bytes = n};
      in.pieces[0] = {.to = PlaneAt(tensor, q) + begin, .from = room.data(), .bytes = n};
      RETURN_IF_ERROR(DoNow(tensor, out));
      RETURN_IF_ERROR(DoNow(tensor, in));
    }
    ++q;
  }
  return absl::OkStatus();
}

absl::Status ParameterStore::ConvertWeights(const ParameterStore& past, uint32_t tensor) {
  const RunSpec &spec = *environment_.spec, &past_spec = *past.environment_.spec;
  const TensorSpec& t = spec.tensors[tensor];
  Device* const device = environment_.devices[environment_.plan->placement.shard_of[tensor]];
  const uint64_t most = std::min(t.elements, spec.chunk_elements) * sizeof(float);
  ASSIGN_OR_RETURN(const DeviceBuffer room, device->Allocate(AlignUp(most), Place::kAside));
  const kernels::WireIndex fp32 = kernels::FindWireFormat("fp32");
  for (uint64_t k = 0; k < ChunkCount(spec, t); ++k) {
    const uint64_t first = ChunkBegin(spec, k), last = ChunkEnd(spec, t, k);
    RETURN_IF_ERROR(DoNow(tensor, EncodeWeightsTask{.master = past_spec.groups[past_spec.tensors[tensor].group].master,
                                                    .planes = past.MasterPlanes(tensor),
                                                    .format = fp32,
                                                    .first = first,
                                                    .last = last,
                                                    .out = room.data()}));
    RETURN_IF_ERROR(CheckHeld(t, *spec.groups[t.group].master, room.data(), last - first));
    RETURN_IF_ERROR(DoNow(tensor, LoadTask{.master = spec.groups[t.group].master,
                                           .planes = MasterPlanes(tensor),
                                           .format = fp32,
                                           .first = first,
                                           .last = last,
                                           .in = room.data()}));
  }
  return absl::OkStatus();
}

absl::Status ParameterStore::DoNow(uint32_t tensor, DeviceTask task) {
  DeviceQueue& queue = *ShardOf(tensor).queue;
  std::optional<bool> finite;
  queue.Submit(std::move(task), [&finite](const TaskResult& result) { finite = result.finite; });
  queue.WaitIdle();
  const std::string& name = environment_.spec->tensors[tensor].name;
  if (!finite) return absl::UnavailableError(absl::StrCat("the device of tensor '", name, "' has failed"));
  if (*finite) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tensor '", name, "' has weights that are not finite in the format that it is to be stored in"));
}

void ParameterStore::TakeOver(ParameterStore* past) {
  const std::vector<std::vector<bool>> stay = past->StayingParts(*environment_.spec);
  for (size_t s = 0; s < shards_.size(); ++s) {
    std::vector<Part>& parts = shards_[s].parts;
    std::vector<Part> own = std::exchange(parts, {});
    std::vector<size_t> places(stay[s].size());  // of past's parts
    for (size_t p = 0; p < places.size(); ++p) {
      places[p] = parts.size();
      if (stay[s][p]) parts.push_back(std::move(past->shards_[s].parts[p]));
    }
    for (uint32_t i = 0; i < spots_.size(); ++i) {
      if (environment_.plan->placement.shard_of[i] != s) continue;
      spots_[i].part = stays_[i] ? places[past->spots_[i].part] : parts.size();
      if (!stays_[i]) continue;
      spots_[i].offset = past->spots_[i].offset;
      spots_[i].first_average = past->spots_[i].first_average;
    }
    std::move(own.begin(), own.end(), std::back_inserter(parts));
    uint64_t begin = 0;
    for (Part& part : parts) part.image_begin = std::exchange(begin, begin + part.bytes());
  }
  for (uint32_t i = 0; i < past->spots_.size(); ++i) {
    spots_[i].state_loaded = past->spots_[i].state_loaded;
    versions_[i] = past->versions_[i] + 1;
    updates_[i] = past->updates_[i];
    step_of_[i] = past->step_of_[i];
    averaged_[i] = past->averaged_[i];
  }
}

}  // namespace ballast
