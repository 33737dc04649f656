#include "server/device/gpu_batch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "server/base/status_macros.h"
#include "server/spec/run_spec.h"

namespace ballast {
namespace {

using kernels::DeviceCopy;
using kernels::DeviceCurvature;
using kernels::DeviceGradient;
using kernels::DeviceUpdate;
using kernels::kPad;
using kernels::TileCurvature;
using kernels::TilesOf;
using kernels::TileStatistics;
using Tasks = std::span<const DeviceTask* const>;

constexpr uint64_t kLeastTiles = 1024;  // of a batch of small tensors
constexpr uint64_t kPartAlignment = 256;

uint64_t AlignPart(uint64_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

// Whole rows, as kernels/cuda/cuda_kernels.h wants payloads.
uint64_t PayloadBytes(const EncodeWeightsTask& t) {
  return AlignPart((t.last - t.first + kPad - 1) / kPad * kPad * WireBytes(t.format));
}

template <class T>
size_t IndexIn(std::span<const T> all, const T* one) {
  return static_cast<size_t>(one - all.data());
}
template <class T>
const T& As(const DeviceTask* task) {
  return std::get<T>(*task);
}

// The tiles of an UpdateTask or MeasureTask, or the sampled tiles of a CurvatureTask.
uint64_t TilesOfTask(const DeviceTask& task) {
  if (const auto* u = std::get_if<UpdateTask>(&task)) return TilesOf(u->update.n);
  if (const auto* c = std::get_if<CurvatureTask>(&task)) return kernels::SampledTiles(c->probe.n);
  return TilesOf(std::get<MeasureTask>(task).elements);
}
uint64_t TilesOfTasks(Tasks batch) {
  uint64_t tiles = 0;
  for (const DeviceTask* task : batch) tiles += TilesOfTask(*task);
  return tiles;
}

// The gradient that a task reads.
struct GradientRead {
  const void* data;
  uint64_t bytes;
  bool on_device;  // a task before it brought it there
};
GradientRead GradientOf(const UpdateTask& t) {
  return {t.update.grad, t.update.n * WireBytes(t.update.grad_format), t.measured};
}
GradientRead GradientOf(const CurvatureTask& t) {
  return {t.probe.grad, t.probe.n * WireBytes(t.probe.grad_format), t.measured};
}
GradientRead GradientOf(const MeasureTask& t) { return {t.gradient, t.elements * WireBytes(t.format), false}; }

// What the kernel is told of it, all but where its tiles are; its gradient is at `twin` there.
DeviceUpdate ItemOf(const UpdateTask& t, const std::byte* twin) {
  DeviceUpdate item{.update = t.update};
  item.update.grad = twin;
  return item;
}
DeviceCurvature ItemOf(const CurvatureTask& t, const std::byte* twin) {
  DeviceCurvature item{.probe = t.probe};
  item.probe.grad = twin;
  return item;
}
DeviceGradient ItemOf(const MeasureTask& t, const std::byte* twin) {
  return {.grad = twin, .format = t.format, .scale = t.scale, .n = t.elements};
}

// All tasks of a batch want the same kernel. items: where they are on the device.
void Launch(GpuDriver* gpu, Tasks batch, DeviceUpdate* items, uint64_t tiles) {
  const bool ordinary = std::ranges::all_of(
      batch, [](const DeviceTask* task) { return kernels::IsOrdinary(As<UpdateTask>(task).update); });
  gpu->Update(IndexIn(kernels::Kernels(), As<UpdateTask>(batch.front()).kernel), items, static_cast<int>(batch.size()),
              tiles, ordinary);
}
void Launch(GpuDriver* gpu, Tasks batch, const DeviceCurvature* items, uint64_t tiles) {
  gpu->ProbeCurvature(IndexIn(kernels::Kernels(), As<CurvatureTask>(batch.front()).kernel), items,
                      static_cast<int>(batch.size()), tiles);
}
void Launch(GpuDriver* gpu, Tasks batch, const DeviceGradient* items, uint64_t tiles) {
  gpu->Measure(items, static_cast<int>(batch.size()), tiles);
}

DeviceCopy CopyOf(const std::array<std::byte*, kernels::kMaxPlanes>& planes, uint64_t first, uint64_t last) {
  DeviceCopy copy{};
  std::copy_n(planes.begin(), std::size(copy.planes), copy.planes);
  copy.first = first;
  copy.last = last;
  copy.row_length = 1;
  return copy;
}

// The rows whose scales a piece needs.
struct Rows {
  uint64_t first, count;
};
Rows RowsOf(const EncodeWeightsTask& t) {
  if (t.scales == nullptr || t.first == t.last) return {0, 0};
  const uint64_t first = t.first / t.row_length;
  return {first, (t.last - 1) / t.row_length + 1 - first};
}

}  // namespace

GpuStaging::GpuStaging(GpuDriver* gpu, const QueueNeeds& needs, TwinOf twin_of)
    : gpu_(gpu),
      twin_of_(std::move(twin_of)),
      tile_capacity_(std::max(needs.tiles, kLeastTiles)),
      payload_capacity_(AlignPart(needs.payload_bytes) + kPad * sizeof(float)) {
  items_ = kPartAlignment;
  tiles_ = items_ + AlignPart(kMostTasks * std::max({sizeof(DeviceUpdate), sizeof(DeviceGradient),
                                                     sizeof(DeviceCurvature), sizeof(DeviceCopy)}));
  static_assert(sizeof(TileCurvature) <= sizeof(TileStatistics));  // they share a part
  sums_ = tiles_ + AlignPart(tile_capacity_ * sizeof(TileStatistics));
  payload_ = sums_ + AlignPart(tile_capacity_ * sizeof(float));
  scales_ = payload_ + payload_capacity_;
  end_ = scales_ + AlignPart(needs.scales * sizeof(float));
}

GpuStaging::~GpuStaging() {
  if (host_ != nullptr) gpu_->Free(host_, GpuDriver::Memory::kPinned);
  if (device_ != nullptr) gpu_->Free(device_, GpuDriver::Memory::kDevice);
}

absl::Status GpuStaging::Reserve() {
  ASSIGN_OR_RETURN(device_, gpu_->Allocate(end_, GpuDriver::Memory::kDevice));
  ASSIGN_OR_RETURN(host_, gpu_->Allocate(end_, GpuDriver::Memory::kPinned));
  for (GpuDriver::Event* event : {&in_, &computed_, &out_}) {
    ASSIGN_OR_RETURN(*event, gpu_->NewEvent());
  }
  return absl::OkStatus();
}

bool GpuStaging::Fits(Tasks batch, const DeviceTask& next) const {
  if (batch.size() == kMostTasks || batch.front()->index() != next.index()) return false;
  if (const auto* u = std::get_if<UpdateTask>(&next)) {
    for (const DeviceTask* task : batch) {
      const auto& other = As<UpdateTask>(task);
      // A tensor's next update reads what the one before it wrote.
      if (other.kernel != u->kernel || other.update.planes[0] == u->update.planes[0]) return false;
    }
    return TilesOfTasks(batch) + TilesOfTask(next) <= tile_capacity_;
  }
  if (const auto* c = std::get_if<CurvatureTask>(&next)) {
    for (const DeviceTask* task : batch) {
      const auto& other = As<CurvatureTask>(task);
      if (other.kernel->curvature != c->kernel->curvature || other.probe.before == c->probe.before) return false;
    }
    return TilesOfTasks(batch) + TilesOfTask(next) <= tile_capacity_;
  }
  if (std::holds_alternative<MeasureTask>(next)) return TilesOfTasks(batch) + TilesOfTask(next) <= tile_capacity_;
  const auto* s = std::get_if<EncodeWeightsTask>(&next);
  if (s == nullptr || s->scales != nullptr) return false;
  uint64_t bytes = PayloadBytes(*s);
  for (const DeviceTask* task : batch) {
    const auto& other = As<EncodeWeightsTask>(task);
    if (other.master != s->master || other.format != s->format) return false;
    bytes += PayloadBytes(other);
  }
  return bytes <= payload_capacity_;
}

void GpuStaging::StartCompute(uint64_t item_bytes) {
  gpu_->Copy(GpuDriver::Stream::kIn, device_ + items_, host_ + items_, item_bytes);
  gpu_->Record(in_, GpuDriver::Stream::kIn);
  gpu_->Wait(GpuDriver::Stream::kCompute, in_);
}

void GpuStaging::StartOut() {
  gpu_->Record(computed_, GpuDriver::Stream::kCompute);
  gpu_->Wait(GpuDriver::Stream::kOut, computed_);
}

void GpuStaging::CopyOut(uint64_t at, uint64_t bytes) {
  gpu_->Copy(GpuDriver::Stream::kOut, host_ + at, device_ + at, bytes);
}

template <class Task>
void GpuStaging::GiveGradients(Tasks batch) {
  using Item = decltype(ItemOf(std::declval<Task>(), nullptr));
  using Tile = std::remove_pointer_t<decltype(Item::tiles)>;
  Item* item = OnHost<Item>(items_);
  uint64_t tiles = 0;
  for (const DeviceTask* task : batch) {
    const GradientRead gradient = GradientOf(As<Task>(task));
    std::byte* const twin = twin_of_(gradient.data);
    if (!gradient.on_device) gpu_->Copy(GpuDriver::Stream::kIn, twin, gradient.data, gradient.bytes);
    *item = ItemOf(As<Task>(task), twin);
    item->first_tile = tiles;
    item->tiles = OnDevice<Tile>(tiles_) + tiles;
    if constexpr (requires { item->sums; }) item->sums = OnDevice<float>(sums_) + tiles;
    ++item;
    tiles += TilesOfTask(*task);
  }
  StartCompute(batch.size() * sizeof(Item));
  Launch(gpu_, batch, OnDevice<Item>(items_), tiles);
  StartOut();
  CopyOut(tiles_, tiles * sizeof(Tile));
}

void GpuStaging::GiveServes(Tasks batch) {
  DeviceCopy* item = OnHost<DeviceCopy>(items_);
  uint64_t tiles = 0, payload = payload_;
  for (const DeviceTask* task : batch) {
    const auto& serve = As<EncodeWeightsTask>(task);
    *item = CopyOf(serve.planes, serve.first, serve.last);
    item->first_tile = tiles;
    item->payload = device_ + payload;
    item->scales = const_cast<float*>(serve.scales);  // only read
    item++->row_length = std::max<uint64_t>(serve.row_length, 1);
    tiles += TilesOf(serve.last - serve.first);
    payload += PayloadBytes(serve);
  }
  StartCompute(batch.size() * sizeof(DeviceCopy));
  const auto& front = As<EncodeWeightsTask>(batch.front());
  gpu_->EncodeWeights(IndexIn(kernels::MasterFormats(), front.master), OnDevice<DeviceCopy>(items_),
                      static_cast<int>(batch.size()), tiles, front.format);
  // Copied in the kernels' stream, since the tensor's next ScaleTask may already be at work when results go out.
  const Rows rows = RowsOf(front);
  gpu_->Copy(GpuDriver::Stream::kCompute, device_ + scales_, front.scales + rows.first, rows.count * sizeof(float));
  StartOut();
  CopyOut(payload_, payload - payload_);
  CopyOut(scales_, rows.count * sizeof(float));
}

void GpuStaging::GiveLoad(const LoadTask& task) {
  const uint64_t bytes = (task.last - task.first) * WireBytes(task.format);
  std::memcpy(host_ + payload_, task.in, bytes);
  gpu_->Copy(GpuDriver::Stream::kIn, device_ + payload_, host_ + payload_, bytes);
  DeviceCopy* const item = OnHost<DeviceCopy>(items_);
  *item = CopyOf(task.planes, task.first, task.last);
  item->payload = device_ + payload_;
  item->refused = OnDevice<uint32_t>(0);
  StartCompute(sizeof(DeviceCopy));
  gpu_->Zero(GpuDriver::Stream::kCompute, device_, sizeof(uint32_t));
  gpu_->Load(IndexIn(kernels::MasterFormats(), task.master), OnDevice<DeviceCopy>(items_), 1,
             TilesOf(task.last - task.first), task.format);
  StartOut();
  CopyOut(0, sizeof(uint32_t));
}

void GpuStaging::GiveScales(const ScaleTask& task) {
  DeviceCopy* const item = OnHost<DeviceCopy>(items_);
  *item = CopyOf(task.planes, 0, task.elements);
  item->scales = task.scales;
  item->row_length = task.row_length;
  StartCompute(sizeof(DeviceCopy));
  gpu_->Zero(GpuDriver::Stream::kCompute, task.scales, task.elements / task.row_length * sizeof(float));
  gpu_->RaiseScales(IndexIn(kernels::MasterFormats(), task.master), OnDevice<DeviceCopy>(items_), 1,
                    TilesOf(task.elements));
  StartOut();
}

// Copies in the kernels' stream, and so after the update before it and before the one behind it.
void GpuStaging::GiveCopy(const CopyTask& task) {
  for (const CopyTask::Piece& p : task.pieces) {
    if (p.bytes > 0) gpu_->Copy(GpuDriver::Stream::kCompute, p.to, p.from, p.bytes);
  }
  StartOut();
}

void GpuStaging::Give(Tasks batch) {
  if (!batch.empty()) GiveTasks(batch);
  gpu_->Record(out_, GpuDriver::Stream::kOut);
}

void GpuStaging::GiveTasks(Tasks batch) {
  const DeviceTask& front = *batch.front();
  if (std::holds_alternative<UpdateTask>(front)) {
    GiveGradients<UpdateTask>(batch);
  } else if (std::holds_alternative<MeasureTask>(front)) {
    GiveGradients<MeasureTask>(batch);
  } else if (std::holds_alternative<CurvatureTask>(front)) {
    GiveGradients<CurvatureTask>(batch);
  } else if (std::holds_alternative<EncodeWeightsTask>(front)) {
    GiveServes(batch);
  } else if (const auto* load = std::get_if<LoadTask>(&front)) {
    GiveLoad(*load);
  } else if (const auto* copy = std::get_if<CopyTask>(&front)) {
    GiveCopy(*copy);
  } else {
    GiveScales(std::get<ScaleTask>(front));
  }
}

TaskResult GpuStaging::Take(Tasks batch, size_t i) {
  TaskResult result;
  const auto* u = std::get_if<UpdateTask>(batch[i]);
  if (u != nullptr || std::holds_alternative<MeasureTask>(*batch[i])) {
    const bool full = u != nullptr && u->update.statistics == kernels::StatisticsLevel::kFull;
    result.statistics = kernels::Combine(
        {OnHost<const TileStatistics>(tiles_) + TilesOfTasks(batch.first(i)), TilesOfTask(*batch[i])}, full);
  } else if (std::holds_alternative<CurvatureTask>(*batch[i])) {
    result.curvature =
        kernels::Combine({OnHost<const TileCurvature>(tiles_) + TilesOfTasks(batch.first(i)), TilesOfTask(*batch[i])});
  } else if (const auto* s = std::get_if<EncodeWeightsTask>(batch[i])) {
    uint64_t at = payload_;
    for (const DeviceTask* task : batch.first(i)) at += PayloadBytes(As<EncodeWeightsTask>(task));
    std::memcpy(s->out, host_ + at, (s->last - s->first) * WireBytes(s->format));
    const Rows rows = RowsOf(*s);
    if (rows.count > 0) std::memcpy(s->scales_out, host_ + scales_, rows.count * sizeof(float));
  } else if (std::holds_alternative<LoadTask>(*batch[i])) {
    result.finite = *OnHost<const uint32_t>(0) == 0;
  }
  return result;
}

}  // namespace ballast
