// Images of the store: all of its weights and state once more, in host memory, or one tensor's.
#include <utility>

#include "server/base/status_macros.h"
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
  const auto planes = environment_.spec->groups[t.group].kernel->planes;
  StoreImage image{.shards = {}, .only = only};
  Device* const device = environment_.devices[environment_.plan->placement.shard_of[only]];
  ASSIGN_OR_RETURN(DeviceBuffer room, device->Allocate(StoredBytes(planes, planes.size(), t.elements), Place::kAside));
  image.shards.push_back(std::move(room));
  return image;
}

std::byte* ParameterStore::PlaneIn(const StoreImage& image, uint32_t tensor, size_t plane) const {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const auto planes = environment_.spec->groups[t.group].kernel->planes;
  if (image.only) return image.shards[0].data() + StoredBytes(planes, plane, t.elements);
  const size_t kind = Index(planes[plane].kind);
  const Part& part = ShardOf(tensor).parts[spots_[tensor].part];
  uint64_t offset = part.image_begin + spots_[tensor].offset[plane];
  for (size_t k = 0; k < kind; ++k) offset += part.buffers[k].bytes();
  return image.shards[environment_.plan->placement.shard_of[tensor]].data() + offset;
}

absl::Span<std::byte> ParameterStore::SavedPlane(const StoreImage& image, uint32_t tensor, size_t plane) const {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const kernels::Plane& p = environment_.spec->groups[t.group].kernel->planes[plane];
  return {PlaneIn(image, tensor, plane), static_cast<size_t>(UsedPlaneBytes(p, t.elements))};
}

void ParameterStore::Save(uint32_t tensor, StoreImage* image, Done done) {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const auto planes = environment_.spec->groups[t.group].kernel->planes;
  CopyTask task{.saves = true};
  for (size_t p = 0; p < planes.size(); ++p) {
    task.pieces[p] = {.to = PlaneIn(*image, tensor, p),
                      .from = PlaneAt(tensor, p),
                      .bytes = kernels::PlaneBytes(planes[p], t.elements)};
  }
  if (spots_[tensor].scales_of == image) spots_[tensor].scales_of = nullptr;
  Submit(tensor, task, OnStrand(std::move(done)));
}

void ParameterStore::Forget(const StoreImage* image) {
  for (Spot& spot : spots_) {
    if (spot.scales_of == image) spot.scales_of = nullptr;
  }
}

void ParameterStore::Restore(uint32_t tensor, const StoreImage& image, const UpdateCount& count) {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const auto planes = environment_.spec->groups[t.group].kernel->planes;
  CopyTask task;
  for (size_t p = 0; p < planes.size(); ++p) {
    task.pieces[p] = {.to = PlaneAt(tensor, p),
                      .from = PlaneIn(image, tensor, p),
                      .bytes = kernels::PlaneBytes(planes[p], t.elements)};
  }
  updates_[tensor] = count.updates;
  step_of_[tensor] = count.step;
  Change(tensor);
  spots_[tensor].scales_of = nullptr;
  spots_[tensor].kept_after.reset();
  Submit(tensor, task, [](const TaskResult&) {});
}

}  // namespace ballast
