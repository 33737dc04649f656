// State that a client uploads: encoded on the host, which gives the same bits as every device, and copied into its
// place. State that a reader pulls: copied to the host, and decoded there. State that is stored otherwise in the store
// that follows: both.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/spec/carry_over.h"
#include "server/store/exact_codes.h"
#include "server/store/parameter_store.h"

namespace ballast {
namespace {

using kernels::PlaneKind;

// What the codec's planes of so many elements take, each aligned.
uint64_t RoomBytes(const kernels::MomentCodec& codec, uint64_t elements) {
  uint64_t bytes = 0;
  for (const kernels::Plane& plane : codec.planes) bytes += AlignedPlaneBytes(plane, elements);
  return bytes;
}

// What a range has in one of its tensor's planes.
struct StatePlane {
  size_t index = 0;     // among the tensor's planes
  size_t piece = 0;     // among those of its kind
  uint64_t offset = 0;  // bytes, of the range's first element
  uint64_t bytes = 0;
};
using RoomPlanes = std::array<std::byte*, kernels::kMaxPlanes>;

// Lays the planes of this kind out in `room`, one after another; calls each(plane, where it is in the room). Returns
// those places.
template <typename Each>
RoomPlanes EachStatePlane(const RunSpec& spec, TensorRange range, PlaneKind kind, std::byte* room, Each each) {
  RoomPlanes planes = {};
  const uint64_t n = range.last - range.first;
  const auto all = spec.groups[spec.tensors[range.tensor].group].kernel->planes;
  for (size_t p = 0, s = 0; p < all.size(); ++p) {
    if (all[p].kind != kind) continue;
    each(StatePlane{p, s, range.first / all[p].per * all[p].bytes, kernels::PlaneBytes(all[p], n)}, room);
    planes[s++] = room;
    room += AlignedPlaneBytes(all[p], n);
  }
  return planes;
}

// Rounded to nearest, or as it was where the values were decoded from such codes. INVALID_ARGUMENT names the tensor.
absl::Status Encode(const kernels::MomentCodec& codec, const RoomPlanes& planes, const float* values, uint64_t n,
                    const std::string& tensor, PlaneKind kind) {
  if (codec.encode(planes.data(), values, n, /*random_key=*/0, /*stochastic=*/false)) {
    RecoverCodes(codec, planes.data(), values, n);
    return absl::OkStatus();
  }
  const bool variance = kind == PlaneKind::kVariance;
  return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor, "': a value of its ",
                                                 variance ? "variance" : "momentum", " is not finite, larger than ",
                                                 codec.largest, variance ? ", or negative" : ""));
}

}  // namespace

const kernels::MomentCodec* StateCodec(const RunSpec& spec, uint32_t tensor, PlaneKind kind) {
  return StateCodec(KernelOf(spec, tensor), kind);
}

absl::Status ParameterStore::LoadState(TensorRange range, PlaneKind kind, kernels::WireIndex format,
                                       const std::byte* in, Done done) {
  const RunSpec& spec = *environment_.spec;
  const kernels::MomentCodec& codec = *StateCodec(spec, range.tensor, kind);
  const uint64_t n = range.last - range.first;
  const uint64_t bytes = AlignUp(n * sizeof(float)) + RoomBytes(codec, n);
  Device* const device = environment_.devices[environment_.plan->placement.shard_of[range.tensor]];
  ASSIGN_OR_RETURN(DeviceBuffer room, device->Allocate(bytes, Place::kAside));

  auto* const values = reinterpret_cast<float*>(room.data());
  kernels::WireFormats()[static_cast<size_t>(format)].accumulate(values, in, n, /*first=*/true);
  CopyTask task;
  const RoomPlanes planes = EachStatePlane(
      spec, range, kind, room.data() + AlignUp(n * sizeof(float)), [&](const StatePlane& plane, std::byte* aside) {
        task.pieces[plane.piece] = {
            .to = PlaneAt(range.tensor, plane.index) + plane.offset, .from = aside, .bytes = plane.bytes};
      });
  RETURN_IF_ERROR(Encode(codec, planes, values, n, spec.tensors[range.tensor].name, kind));
  spots_[range.tensor].state_loaded = true;
  spots_[range.tensor].kept_after.reset();
  Change(range.tensor);
  Submit(range.tensor, task,
         completions_.OnStrand(
             [room = std::move(room), done = std::move(done)](const TaskResult& r) mutable { done(r); }));
  return absl::OkStatus();
}

absl::Status ParameterStore::DecodeState(TensorRange wanted, PlaneKind kind, WeightPiece* out, StateRoom* room,
                                         Done done, const StoreImage* image) {
  const RunSpec& spec = *environment_.spec;
  const TensorRange range = TilesAround(wanted);
  auto sealed = CutAndSeal(wanted, range, sizeof(float), out, std::move(done));
  const kernels::MomentCodec& codec = *StateCodec(spec, range.tensor, kind);
  const uint64_t n = range.last - range.first;
  const uint64_t bytes = RoomBytes(codec, n);
  const uint32_t shard = environment_.plan->placement.shard_of[range.tensor];
  if (room->shard != shard || room->memory.bytes() < bytes) {
    room->memory = {};
    ASSIGN_OR_RETURN(room->memory, environment_.devices[shard]->Allocate(bytes, Place::kAside));
    room->shard = shard;
  }
  CopyTask task;
  const RoomPlanes planes =
      EachStatePlane(spec, range, kind, room->memory.data(), [&](const StatePlane& plane, std::byte* aside) {
        const std::byte* const stored =
            image == nullptr ? PlaneAt(range.tensor, plane.index) : PlaneIn(*image, range.tensor, plane.index);
        task.pieces[plane.piece] = {.to = aside, .from = stored + plane.offset, .bytes = plane.bytes};
      });
  auto* const values = reinterpret_cast<float*>(out->Resize(n * sizeof(float)));
  out->scales.clear();
  Submit(range.tensor, task, [&codec, planes, values, n, sealed = std::move(sealed)](const TaskResult& r) mutable {
    codec.decode(planes.data(), values, n);
    sealed(r);
  });
  return absl::OkStatus();
}

absl::Status ParameterStore::ConvertState(const ParameterStore& past, TensorRange range, PlaneKind kind) {
  const RunSpec &spec = *environment_.spec, &past_spec = *past.environment_.spec;
  const kernels::MomentCodec &from = *StateCodec(past_spec, range.tensor, kind),
                             &to = *StateCodec(spec, range.tensor, kind);
  const uint64_t n = range.last - range.first, value_bytes = AlignUp(n * sizeof(float));
  Device* const device = environment_.devices[environment_.plan->placement.shard_of[range.tensor]];
  ASSIGN_OR_RETURN(const DeviceBuffer room,
                   device->Allocate(value_bytes + RoomBytes(from, n) + RoomBytes(to, n), Place::kAside));
  auto* const values = reinterpret_cast<float*>(room.data());

  std::byte* aside = room.data() + value_bytes;
  CopyTask task;
  const RoomPlanes old = EachStatePlane(past_spec, range, kind, aside, [&](const StatePlane& plane, std::byte* at) {
    task.pieces[plane.piece] = {
        .to = at, .from = past.PlaneAt(range.tensor, plane.index) + plane.offset, .bytes = plane.bytes};
  });
  RETURN_IF_ERROR(DoNow(range.tensor, task));
  from.decode(old.data(), values, n);
  aside += RoomBytes(from, n);
  task = {};
  const RoomPlanes planes = EachStatePlane(spec, range, kind, aside, [&](const StatePlane& plane, std::byte* at) {
    task.pieces[plane.piece] = {
        .to = PlaneAt(range.tensor, plane.index) + plane.offset, .from = at, .bytes = plane.bytes};
  });
  RETURN_IF_ERROR(Encode(to, planes, values, n, spec.tensors[range.tensor].name, kind));
  return DoNow(range.tensor, task);
}

absl::Status ParameterStore::ForgetLoadedState() {
  const uint64_t chunk_bytes = environment_.spec->chunk_elements * sizeof(float);
  std::vector<std::shared_ptr<const DeviceBuffer>> zeros(shards_.size());  // by shard, where it is needed
  for (uint32_t i = 0; i < spots_.size(); ++i) {
    if (!spots_[i].state_loaded) continue;
    const uint32_t shard = environment_.plan->placement.shard_of[i];
    if (zeros[shard] == nullptr) {
      ASSIGN_OR_RETURN(DeviceBuffer buffer, environment_.devices[shard]->Allocate(chunk_bytes, Place::kAside));
      zeros[shard] = std::make_shared<const DeviceBuffer>(std::move(buffer));
    }
    ClearState(i, zeros[shard]);
    spots_[i].state_loaded = false;
    updates_[i] = 0;
  }
  return absl::OkStatus();
}

void ParameterStore::ClearState(uint32_t tensor, const std::shared_ptr<const DeviceBuffer>& zeros) {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const auto planes = environment_.spec->groups[t.group].kernel->planes;
  for (size_t p = 0; p < planes.size(); ++p) {
    if (planes[p].kind == PlaneKind::kWeights) continue;
    const uint64_t bytes = kernels::PlaneBytes(planes[p], t.elements);
    for (uint64_t begin = 0; begin < bytes; begin += zeros->bytes()) {
      CopyTask task;
      task.pieces[0] = {
          .to = PlaneAt(tensor, p) + begin, .from = zeros->data(), .bytes = std::min(zeros->bytes(), bytes - begin)};
      Submit(tensor, task, completions_.OnStrand([zeros](const TaskResult&) {}));
    }
  }
}

void ParameterStore::SetUpdates(uint32_t tensor, uint64_t updates) {
  updates_[tensor] = updates;
  spots_[tensor].state_loaded = true;
  Change(tensor);
}

}  // namespace ballast
