#include "server/device/gpu_batch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "proto/checksum.h"

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
constexpr uint64_t kGradientAlignment = 64;  // at most, of gradients that lie side by side

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

// The tiles of an UpdateTask or MeasureTask, or the sampled tiles of a CurvatureTask; else none.
uint64_t TilesOfTask(const DeviceTask& task) {
  if (const auto* u = std::get_if<UpdateTask>(&task)) return TilesOf(u->update.n);
  if (const auto* c = std::get_if<CurvatureTask>(&task)) return kernels::SampledTiles(c->probe.n);
  const auto* m = std::get_if<MeasureTask>(&task);
  return m != nullptr ? TilesOf(m->elements) : 0;
}

// What no two tasks of a batch may share: a tensor's next update, or probe, reads what the one before it wrote.
const void* OwnMemory(const DeviceTask& task) {
  if (const auto* u = std::get_if<UpdateTask>(&task)) return u->update.planes[0];
  const auto* c = std::get_if<CurvatureTask>(&task);
  return c != nullptr ? c->probe.before : nullptr;
}

// Whether one launch does both, which are of a kind.
bool OfOneLaunch(const DeviceTask& a, const DeviceTask& b) {
  if (const auto* u = std::get_if<UpdateTask>(&a)) {
    return u->kernel->fit == nullptr && u->kernel == std::get<UpdateTask>(b).kernel;
  }
  if (std::holds_alternative<CurvatureTask>(a)) {
    return std::get<CurvatureTask>(a).kernel->curvature == std::get<CurvatureTask>(b).kernel->curvature;
  }
  if (std::holds_alternative<MeasureTask>(a)) return true;
  const auto *s = std::get_if<EncodeWeightsTask>(&a), *t = std::get_if<EncodeWeightsTask>(&b);
  return s != nullptr && s->scales == nullptr && t->scales == nullptr && s->master == t->master &&
         s->format == t->format;
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
  const auto& [kernel, update, statistics, room, measured] = As<UpdateTask>(batch.front());
  const size_t number = IndexIn(kernels::Kernels(), kernel);
  if (kernel->fit != nullptr) {  // alone in its batch
    gpu->Direct(number, items, 1, tiles);
    gpu->Orthogonalize({.update = items,
                        .rows = update.rows,
                        .columns = update.n / update.rows,
                        .direction = update.direction,
                        .room = reinterpret_cast<std::byte*>(room)});
  }
  gpu->Update(number, items, static_cast<int>(batch.size()), tiles, ordinary);
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
  for (const GpuDriver::Event event : {in_, computed_, saved_, out_}) {
    if (event != GpuDriver::kNoEvent) gpu_->FreeEvent(event);
  }
}

absl::Status GpuStaging::Reserve() {
  ASSIGN_OR_RETURN(device_, gpu_->Allocate(end_, GpuDriver::Memory::kDevice));
  ASSIGN_OR_RETURN(host_, gpu_->Allocate(end_, GpuDriver::Memory::kPinned));
  for (GpuDriver::Event* event : {&in_, &computed_, &saved_, &out_}) {
    ASSIGN_OR_RETURN(*event, gpu_->NewEvent());
  }
  return absl::OkStatus();
}

GpuStaging::Room GpuStaging::RoomOf(const DeviceTask& task) {
  const auto* s = std::get_if<EncodeWeightsTask>(&task);
  return {.tiles = TilesOfTask(task), .payload_bytes = s != nullptr ? PayloadBytes(*s) : 0};
}

void GpuStaging::Begin() {
  tasks_.clear();
  tensors_.clear();
  room_ = {};
  taken_ = 0;
  taken_tiles_ = 0;
}

bool GpuStaging::CanJoin(const DeviceTask& task) const {
  if (tasks_.empty()) return true;
  const DeviceTask& front = *tasks_.front();
  if (tasks_.size() == kMostTasks || front.index() != task.index() || !OfOneLaunch(front, task)) return false;
  const void* const own = OwnMemory(task);
  if (own != nullptr && std::ranges::find(tensors_, own) != tensors_.end()) return false;
  const Room room = RoomOf(task);
  return room_.tiles + room.tiles <= tile_capacity_ && room_.payload_bytes + room.payload_bytes <= payload_capacity_;
}

void GpuStaging::Join(const DeviceTask* task) {
  const Room room = RoomOf(*task);
  tasks_.push_back(task);
  tensors_.push_back(OwnMemory(*task));
  room_.tiles += room.tiles;
  room_.payload_bytes += room.payload_bytes;
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

// Those that lie side by side, but for what aligns them, in one copy: each call costs some microseconds.
void GpuStaging::BringGradients() {
  std::ranges::sort(gradients_, {}, &Gradient::from);
  for (size_t i = 0; i < gradients_.size();) {
    const auto& [to, from, bytes] = gradients_[i];
    const std::byte* end = from + bytes;
    size_t next = i + 1;
    for (; next < gradients_.size() && gradients_[next].from - from == gradients_[next].to - to; ++next) {
      if (gradients_[next].from >= end + kGradientAlignment) break;
      end = std::max(end, gradients_[next].from + gradients_[next].bytes);
    }
    gpu_->Copy(GpuDriver::Stream::kIn, to, from, static_cast<uint64_t>(end - from));
    i = next;
  }
  gradients_.clear();
}

template <class Task>
void GpuStaging::GiveGradients() {
  using Item = decltype(ItemOf(std::declval<Task>(), nullptr));
  using Tile = std::remove_pointer_t<decltype(Item::tiles)>;
  Item* item = OnHost<Item>(items_);
  uint64_t tiles = 0;
  for (const DeviceTask* task : tasks_) {
    const GradientRead gradient = GradientOf(As<Task>(task));
    std::byte* const twin = twin_of_(gradient.data);
    if (!gradient.on_device && gradient.bytes > 0) {
      gradients_.push_back({twin, static_cast<const std::byte*>(gradient.data), gradient.bytes});
    }
    *item = ItemOf(As<Task>(task), twin);
    item->first_tile = tiles;
    item->tiles = OnDevice<Tile>(tiles_) + tiles;
    if constexpr (requires { item->sums; }) item->sums = OnDevice<float>(sums_) + tiles;
    ++item;
    tiles += TilesOfTask(*task);
  }
  BringGradients();
  StartCompute(tasks_.size() * sizeof(Item));
  Launch(gpu_, tasks_, OnDevice<Item>(items_), tiles);
  StartOut();
  CopyOut(tiles_, tiles * sizeof(Tile));
}

void GpuStaging::GiveServes() {
  if (std::ranges::any_of(tasks_, [](const DeviceTask* t) { return As<EncodeWeightsTask>(t).from_aside; }))
    AwaitSaves();
  DeviceCopy* item = OnHost<DeviceCopy>(items_);
  uint64_t tiles = 0, payload = payload_;
  for (const DeviceTask* task : tasks_) {
    const auto& serve = As<EncodeWeightsTask>(task);
    *item = CopyOf(serve.planes, serve.first, serve.last);
    item->first_tile = tiles;
    item->payload = device_ + payload;
    item->scales = const_cast<float*>(serve.scales);  // only read
    item++->row_length = std::max<uint64_t>(serve.row_length, 1);
    tiles += TilesOf(serve.last - serve.first);
    payload += PayloadBytes(serve);
  }
  StartCompute(tasks_.size() * sizeof(DeviceCopy));
  const auto& front = As<EncodeWeightsTask>(tasks_.front());
  gpu_->EncodeWeights(IndexIn(kernels::MasterFormats(), front.master), OnDevice<DeviceCopy>(items_),
                      static_cast<int>(tasks_.size()), tiles, front.format);
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
  if (task.from_aside) AwaitSaves();
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

uint64_t GpuStaging::RoomOfPiece(uint64_t bytes) { return AlignPart(bytes); }

void GpuStaging::Give() {
  if (!tasks_.empty()) GiveTasks();
  gpu_->Record(out_, GpuDriver::Stream::kOut);
}

void GpuStaging::GiveTasks() {
  const DeviceTask& front = *tasks_.front();
  if (std::holds_alternative<UpdateTask>(front)) {
    GiveGradients<UpdateTask>();
  } else if (std::holds_alternative<MeasureTask>(front)) {
    GiveGradients<MeasureTask>();
  } else if (std::holds_alternative<CurvatureTask>(front)) {
    GiveGradients<CurvatureTask>();
  } else if (std::holds_alternative<EncodeWeightsTask>(front)) {
    GiveServes();
  } else if (const auto* load = std::get_if<LoadTask>(&front)) {
    GiveLoad(*load);
  } else if (const auto* copy = std::get_if<CopyTask>(&front)) {
    GiveCopy(*copy);
  } else {
    GiveScales(std::get<ScaleTask>(front));
  }
}

TaskResult GpuStaging::Take() {
  TaskResult result;
  const DeviceTask& task = *tasks_[taken_++];
  const uint64_t at = taken_tiles_, tiles = TilesOfTask(task);
  taken_tiles_ += tiles;
  const auto* u = std::get_if<UpdateTask>(&task);
  if (u != nullptr || std::holds_alternative<MeasureTask>(task)) {
    const bool full = u != nullptr && u->update.statistics == kernels::StatisticsLevel::kFull;
    result.statistics = kernels::Combine({OnHost<const TileStatistics>(tiles_) + at, tiles}, full);
  } else if (std::holds_alternative<CurvatureTask>(task)) {
    result.curvature = kernels::Combine({OnHost<const TileCurvature>(tiles_) + at, tiles});
  } else if (std::holds_alternative<LoadTask>(task)) {
    result.finite = *OnHost<const uint32_t>(0) == 0;
  }
  return result;
}

void GpuStaging::AddCopies(uint64_t most, std::vector<HostCopy>* copies) const {
  const auto add = [&](void* to, uint64_t at, uint64_t bytes, uint32_t* crc32c) {
    const uint64_t together = crc32c != nullptr ? bytes : most;
    for (uint64_t done = 0; done < bytes; done += together) {
      copies->push_back(
          {static_cast<std::byte*>(to) + done, host_ + at + done, std::min(together, bytes - done), crc32c});
    }
    if (bytes == 0 && crc32c != nullptr) *crc32c = Crc32c({});
  };
  if (tasks_.empty() || !std::holds_alternative<EncodeWeightsTask>(*tasks_.front())) return;
  uint64_t at = payload_;
  for (const DeviceTask* task : tasks_) {
    const auto& serve = As<EncodeWeightsTask>(task);
    add(serve.out, at, (serve.last - serve.first) * WireBytes(serve.format), serve.crc32c);
    add(serve.scales_out, scales_, RowsOf(serve).count * sizeof(float), nullptr);
    at += PayloadBytes(serve);
  }
}

}  // namespace ballast
