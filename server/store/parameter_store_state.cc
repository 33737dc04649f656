// State that a client uploads: encoded on the host, which gives the same bits as every device, and copied into its
// place. State that a reader pulls: copied to the host, and decoded there.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
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

const char* NameOf(PlaneKind kind) { return kind == PlaneKind::kMomentum ? "momentum" : "variance"; }

}  // namespace

const kernels::MomentCodec* StateCodec(const RunSpec& spec, uint32_t tensor, PlaneKind kind) {
  const kernels::Kernel& kernel = *spec.groups[spec.tensors[tensor].group].kernel;
  const kernels::MomentFormat* const state = kernels::FindMomentFormat(kernel.state);
  if (state == nullptr || kind == PlaneKind::kWeights) return nullptr;
  const kernels::MomentCodec& codec = kind == PlaneKind::kMomentum ? state->momentum : state->variance;
  size_t same = 0;
  for (const kernels::Plane& plane : kernel.planes) {
    if (plane.kind != kind) continue;
    if (same == codec.planes.size()) return nullptr;  // the rule keeps more beside it
    if (plane.bytes != codec.planes[same].bytes || plane.per != codec.planes[same].per) return nullptr;
    ++same;
  }
  return same > 0 && same == codec.planes.size() ? &codec : nullptr;
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
  if (!codec.encode(planes.data(), values, n, /*random_key=*/0, /*stochastic=*/false)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", spec.tensors[range.tensor].name, "': a value of its ",
                                                   NameOf(kind), " is not finite, larger than ", codec.largest,
                                                   kind == PlaneKind::kVariance ? ", or negative" : ""));
  }
  RecoverCodes(codec, planes.data(), values, n);
  spots_[range.tensor].state_loaded = true;
  spots_[range.tensor].kept_after.reset();
  ++versions_[range.tensor];
  ShardOf(range.tensor)
      .queue->Submit(
          task, OnStrand([room = std::move(room), done = std::move(done)](const TaskResult& r) mutable { done(r); }));
  return absl::OkStatus();
}

absl::Status ParameterStore::DecodeState(TensorRange wanted, PlaneKind kind, WeightPiece* out, StateRoom* room,
                                         Done done, const StoreImage* image) {
  const RunSpec& spec = *environment_.spec;
  const TensorRange range = TilesAround(wanted);
  done = CutTo(wanted, range, sizeof(float), out, std::move(done));
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
  ShardOf(range.tensor)
      .queue->Submit(task, OnStrand([&codec, planes, values, n, done = std::move(done)](const TaskResult& r) mutable {
                       codec.decode(planes.data(), values, n);
                       done(r);
                     }));
  return absl::OkStatus();
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
      ShardOf(tensor).queue->Submit(task, OnStrand([zeros](const TaskResult&) {}));
    }
  }
}

void ParameterStore::SetUpdates(uint32_t tensor, uint64_t updates) {
  updates_[tensor] = updates;
  spots_[tensor].state_loaded = true;
  ++versions_[tensor];
}

}  // namespace ballast
