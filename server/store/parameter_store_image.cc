// Images of the store: all of its weights and state once more, in host memory, or one tensor's.
#include <utility>

#include "server/base/status_macros.h"
#include "server/spec/stored_planes.h"
#include "server/store/checkpoint_layout.h"
#include "server/store/parameter_store.h"

namespace ballast {

uint64_t StoreImage::bytes() const {
  uint64_t sum = 0;
  for (const DeviceBuffer& shard : shards) sum += shard.bytes();
  return sum;
}

absl::StatusOr<StoreImage> ParameterStore::NewImage() const {
  StoreImage image;
  for (size_t s = 0; s < shards_.size(); ++s) {
    const uint64_t bytes = environment_.plan->shards[s].bytes.stored();
    ASSIGN_OR_RETURN(DeviceBuffer room, environment_.devices[s]->Allocate(bytes, Place::kAside));
    image.shards.push_back(std::move(room));
  }
  return image;
}

absl::StatusOr<StoreImage> ParameterStore::NewImage(uint32_t only) const {
  const TensorSpec& t = environment_.spec->tensors[only];
  const StoredPlanes planes(*environment_.spec, t);
  StoreImage image{.shards = {}, .only = only};
  Device* const device = environment_.devices[environment_.plan->placement.shard_of[only]];
  ASSIGN_OR_RETURN(DeviceBuffer room, device->Allocate(StoredBytes(planes, planes.size(), t.elements), Place::kAside));
  image.shards.push_back(std::move(room));
  return image;
}

std::byte* ParameterStore::PlaneIn(const StoreImage& image, uint32_t tensor, size_t plane) const {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  if (image.only) {
    return image.shards[0].data() + StoredBytes(StoredPlanes(*environment_.spec, t), plane, t.elements);
  }
  const size_t kind = Index(KindOf(tensor, plane));
  const Part& part = ShardOf(tensor).parts[spots_[tensor].part];
  uint64_t offset = part.image_begin + OffsetOf(tensor, plane);
  for (size_t k = 0; k < kind; ++k) offset += part.buffers[k].bytes();
  return image.shards[environment_.plan->placement.shard_of[tensor]].data() + offset;
}

absl::Span<std::byte> ParameterStore::SavedPlane(const StoreImage& image, uint32_t tensor, size_t plane) const {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const StoredPlanes planes(*environment_.spec, t);
  return {PlaneIn(image, tensor, plane), static_cast<size_t>(UsedPlaneBytes(planes[plane], t.elements))};
}

template <class PieceOf>
void ParameterStore::SubmitCopies(uint32_t tensor, bool saves, PieceOf piece_of, DeviceQueue::Completion done) {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const StoredPlanes planes(*environment_.spec, t);
  CopyTask task{.saves = saves};
  if (planes.size() <= task.pieces.size()) {
    for (size_t p = 0; p < planes.size(); ++p) task.pieces[p] = piece_of(p, kernels::PlaneBytes(planes[p], t.elements));
    return Submit(tensor, task, std::move(done));
  }
  const auto seconds = std::make_shared<double>(0);
  size_t filled = 0;
  for (size_t p = 0; p < planes.size(); ++p) {
    if (filled == task.pieces.size()) {
      Submit(tensor, std::exchange(task, CopyTask{.saves = saves}),
             [seconds](const TaskResult& r) { *seconds += r.seconds; });
      filled = 0;
    }
    task.pieces[filled++] = piece_of(p, kernels::PlaneBytes(planes[p], t.elements));
  }
  Submit(tensor, task, [seconds, done = std::move(done)](TaskResult result) mutable {
    result.seconds += *seconds;
    done(result);
  });
}

void ParameterStore::Save(uint32_t tensor, StoreImage* image, Done done) {
  if (spots_[tensor].scales_of == image) spots_[tensor].scales_of = nullptr;
  const auto piece_of = [&](size_t p, uint64_t bytes) {
    return CopyTask::Piece{.to = PlaneIn(*image, tensor, p), .from = PlaneAt(tensor, p), .bytes = bytes};
  };
  SubmitCopies(tensor, /*saves=*/true, piece_of, completions_.OnStrand(std::move(done)));
}

void ParameterStore::Forget(const StoreImage* image) {
  for (Spot& spot : spots_) {
    if (spot.scales_of == image) spot.scales_of = nullptr;
  }
}

void ParameterStore::Restore(uint32_t tensor, const StoreImage& image, const UpdateCount& count) {
  updates_[tensor] = count.updates;
  step_of_[tensor] = count.step;
  averaged_[tensor] = count.averaged;
  Change(tensor);
  spots_[tensor].scales_of = nullptr;
  spots_[tensor].kept_after.reset();
  const auto piece_of = [&](size_t p, uint64_t bytes) {
    return CopyTask::Piece{.to = PlaneAt(tensor, p), .from = PlaneIn(image, tensor, p), .bytes = bytes};
  };
  SubmitCopies(tensor, /*saves=*/false, piece_of, [](const TaskResult&) {});
}

}  // namespace ballast
