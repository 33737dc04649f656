#include "server/device/gpu_batch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "server/base/status_macros.h"
#include "server/spec/run_spec.h"

namespace ballast {
namespace {

using kernels::DeviceAverage;
using kernels::DeviceCopy;
using kernels::DeviceCurvature;
using kernels::DeviceGradient;
using kernels::DeviceSum;
using kernels::DeviceUpdate;
using kernels::kPad;
using kernels::TileCurvature;
using kernels::TilesOf;
using kernels::TileStatistics;
using Tasks = std::span<const DeviceTask* const>;

constexpr uint64_t kLeastTiles = 1024, kLeastScales = 1024;  // of a batch of small tensors
constexpr uint64_t kGradientAlignment = 64;                  // at most, of gradients that lie side by side

template <class T>
size_t IndexIn(std::span<const T> all, const T* one) {
  return static_cast<size_t>(one - all.data());
}
template <class T>
const T& As(const DeviceTask* task) {
  return std::get<T>(*task);
}

// The gradient that a task reads.
struct GradientRead {
  const void* data;
  uint64_t bytes;
  bool there;  // on the device
};
GradientRead GradientOf(const UpdateTask& t) {
  return {t.update.grad, t.update.n * WireBytes(t.update.grad_format), t.there};
}
GradientRead GradientOf(const CurvatureTask& t) {
  return {t.probe.grad, t.probe.n * WireBytes(t.probe.grad_format), t.there};
}
GradientRead GradientOf(const MeasureTask& t) { return {t.gradient, t.elements * WireBytes(t.format), t.there}; }

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

// The tasks want the same kernel. items: where they are on the device.
void LaunchGradients(GpuDriver* gpu, Tasks batch, DeviceUpdate* items, uint64_t tiles) {
  const bool ordinary = std::ranges::all_of(
      batch, [](const DeviceTask* task) { return kernels::IsOrdinary(As<UpdateTask>(task).update); });
  const UpdateTask& first = As<UpdateTask>(batch.front());
  const size_t number = IndexIn(kernels::Kernels(), first.kernel);
  if (first.kernel->fit != nullptr) {  // alone in its batch
    const kernels::Update& update = first.update;
    gpu->Direct(number, items, 1, tiles);
    gpu->Orthogonalize({.update = items,
                        .rows = update.rows,
                        .columns = update.n / update.rows,
                        .direction = update.direction,
                        .room = reinterpret_cast<std::byte*>(first.room)});
  }
  gpu->Update(number, items, static_cast<int>(batch.size()), tiles, ordinary);
}
void LaunchGradients(GpuDriver* gpu, Tasks batch, const DeviceCurvature* items, uint64_t tiles) {
  gpu->ProbeCurvature(IndexIn(kernels::Kernels(), As<CurvatureTask>(batch.front()).kernel), items,
                      static_cast<int>(batch.size()), tiles);
}
void LaunchGradients(GpuDriver* gpu, Tasks batch, const DeviceGradient* items, uint64_t tiles) {
  gpu->Measure(items, static_cast<int>(batch.size()), tiles);
}

template <class Task>
concept ReadsGradient = requires(const Task& task) {
  GradientOf(task);
};

template <class Task>
using ItemOfKind = decltype(ItemOf(std::declval<Task>(), nullptr));

DeviceCopy CopyOf(const std::array<std::byte*, kernels::kMaxPlanes>& planes, uint64_t first, uint64_t last) {
  DeviceCopy copy{};
  std::copy_n(planes.begin(), std::size(copy.planes), copy.planes);
  copy.first = first;
  copy.last = last;
  copy.row_length = 1;
  return copy;
}

// Calls `give` with each stretch of memory that tasks have one after the other: each call to the driver costs some
// microseconds.
template <class PlaceOf, class Give>
void GiveStretches(Tasks tasks, PlaceOf place_of, Give give) {
  const float* begin = nullptr;
  uint64_t count = 0;
  for (const DeviceTask* task : tasks) {
    const absl::Span<const float> place = place_of(task);
    if (count > 0 && place.data() == begin + count) {
      count += place.size();
      continue;
    }
    if (count > 0) give(begin, count);
    begin = place.data();
    count = place.size();
  }
  if (count > 0) give(begin, count);
}

BatchRoom CapacityOf(const QueueNeeds& needs) {
  return {.tiles = std::max(needs.tiles, kLeastTiles),
          .payload_bytes = AlignPart(needs.payload_bytes) + kPad * sizeof(float),
          .scales = std::max(needs.scales, kLeastScales),
          .terms = BatchGroups::kMostTerms};
}

}  // namespace

GpuStaging::GpuStaging(GpuDriver* gpu, const QueueNeeds& needs, TwinOf twin_of)
    : gpu_(gpu), twin_of_(std::move(twin_of)), capacity_(CapacityOf(needs)) {
  constexpr uint64_t kMost = BatchGroups::kMostTasks;
  items_ = kPartAlignment;
  tiles_ = items_ +
           AlignPart(kMost * std::max({sizeof(DeviceUpdate), sizeof(DeviceGradient), sizeof(DeviceCurvature)})) +
           AlignPart(kMost * sizeof(DeviceSum)) + AlignPart(capacity_.terms * sizeof(std::byte*)) +
           2 * AlignPart(kMost * sizeof(DeviceCopy)) + (needs.averages ? AlignPart(kMost * sizeof(DeviceAverage)) : 0);
  static_assert(sizeof(TileCurvature) <= sizeof(TileStatistics));  // they share a part
  sums_ = tiles_ + AlignPart(capacity_.tiles * sizeof(TileStatistics));
  payload_ = sums_ + AlignPart(capacity_.tiles * sizeof(float));
  scales_ = payload_ + AlignPart(capacity_.payload_bytes);
  end_ = scales_ + AlignPart(capacity_.scales * sizeof(float));
}

GpuStaging::~GpuStaging() {
  if (host_ != nullptr) gpu_->Free(host_, GpuDriver::Memory::kPinned);
  if (device_ != nullptr) gpu_->Free(device_, GpuDriver::Memory::kDevice);
  for (const GpuDriver::Event event : {in_, computed_, saved_, summed_, out_}) {
    if (event != GpuDriver::kNoEvent) gpu_->FreeEvent(event);
  }
}

absl::Status GpuStaging::Reserve() {
  ASSIGN_OR_RETURN(device_, gpu_->Allocate(end_, GpuDriver::Memory::kDevice));
  ASSIGN_OR_RETURN(host_, gpu_->Allocate(end_, GpuDriver::Memory::kPinned));
  for (GpuDriver::Event* event : {&in_, &computed_, &saved_, &summed_, &out_}) {
    ASSIGN_OR_RETURN(*event, gpu_->NewEvent());
  }
  return absl::OkStatus();
}

void GpuStaging::Begin() {
  groups_.Clear();
  items_end_ = items_;
  reads_aside_ = false;
  arriving_bytes_ = tile_bytes_ = payload_bytes_ = scale_bytes_ = taken_tiles_ = 0;
}

void GpuStaging::StartCompute() {
  gpu_->Copy(GpuDriver::Stream::kIn, device_ + items_, host_ + items_, items_end_ - items_);
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

template <class Do>
void GpuStaging::OfKindOfGradients(Do what) const {
  const Tasks tasks = groups_[BatchGroups::kGradients];
  if (tasks.empty()) return;
  std::visit(
      [&]<class Task>(const Task&) {
        if constexpr (ReadsGradient<Task>) what.template operator()<Task>();
      },
      *tasks.front());
}

template <class Task>
void GpuStaging::PrepareGradients() {
  using Item = ItemOfKind<Task>;
  using Tile = std::remove_pointer_t<decltype(Item::tiles)>;
  Item* item = NewItems<Item>(BatchGroups::kGradients);
  uint64_t& tiles = given_[BatchGroups::kGradients].tiles;
  for (const DeviceTask* task : groups_[BatchGroups::kGradients]) {
    const GradientRead gradient = GradientOf(As<Task>(task));
    std::byte* const twin = twin_of_(gradient.data);
    if (!gradient.there && gradient.bytes > 0) {
      gradients_.push_back({twin, static_cast<const std::byte*>(gradient.data), gradient.bytes});
    }
    *item = ItemOf(As<Task>(task), twin);
    item->first_tile = tiles;
    item->tiles = OnDevice<Tile>(tiles_) + tiles;
    if constexpr (requires { item->sums; }) item->sums = OnDevice<float>(sums_) + tiles;
    ++item;
    tiles += RoomOf(*task).tiles;
  }
  tile_bytes_ = tiles * sizeof(Tile);
}

void GpuStaging::PrepareAverages() {
  DeviceAverage* item = NewItems<DeviceAverage>(BatchGroups::kAverages);
  uint64_t& tiles = given_[BatchGroups::kAverages].tiles;
  for (const DeviceTask* one : groups_[BatchGroups::kAverages]) {
    const auto& task = As<AverageTask>(one);
    *item++ = {.average = task.average, .first = task.first, .last = task.last, .first_tile = tiles};
    tiles += TilesOf(task.last - task.first);
  }
}

void GpuStaging::PrepareScales() {
  DeviceCopy* item = NewItems<DeviceCopy>(BatchGroups::kScales);
  uint64_t& tiles = given_[BatchGroups::kScales].tiles;
  for (const DeviceTask* one : groups_[BatchGroups::kScales]) {
    const auto& task = As<ScaleTask>(one);
    reads_aside_ |= task.from_aside;
    *item = CopyOf(task.planes, 0, task.elements);
    item->first_tile = tiles;
    item->scales = task.scales;
    item++->row_length = task.row_length;
    tiles += TilesOf(task.elements);
  }
}

void GpuStaging::PrepareServes() {
  DeviceCopy* item = NewItems<DeviceCopy>(BatchGroups::kServes);
  uint64_t& tiles = given_[BatchGroups::kServes].tiles;
  for (const DeviceTask* one : groups_[BatchGroups::kServes]) {
    const auto& task = As<EncodeWeightsTask>(one);
    const BatchRoom room = RoomOf(*one);
    reads_aside_ |= task.from_aside;
    *item = CopyOf(task.planes, task.first, task.last);
    item->first_tile = tiles;
    item->payload = task.out_on_device ? task.out : device_ + payload_ + arriving_bytes_ + payload_bytes_;
    item->scales = const_cast<float*>(task.scales);  // only read
    item++->row_length = std::max<uint64_t>(task.row_length, 1);
    tiles += TilesOf(task.last - task.first);
    payload_bytes_ += room.payload_bytes;
    scale_bytes_ += room.scales * sizeof(float);
  }
}

void GpuStaging::Prepare() {
  PrepareSums();
  OfKindOfGradients([this]<class Task>() { PrepareGradients<Task>(); });
  PrepareAverages();
  PrepareScales();
  PrepareServes();
}

void GpuStaging::LaunchAverages() {
  const Tasks tasks = groups_[BatchGroups::kAverages];
  if (tasks.empty()) return;
  gpu_->MoveAverages(IndexIn(kernels::MasterFormats(), As<AverageTask>(tasks.front()).master),
                     ItemsOf<DeviceAverage>(BatchGroups::kAverages), static_cast<int>(tasks.size()),
                     given_[BatchGroups::kAverages].tiles);
}

void GpuStaging::LaunchScales() {
  const Tasks tasks = groups_[BatchGroups::kScales];
  if (tasks.empty()) return;
  GiveStretches(
      tasks,
      [](const DeviceTask* one) {
        const auto& task = As<ScaleTask>(one);
        return absl::MakeConstSpan(task.scales, task.elements / task.row_length);
      },
      [this](const float* scales, uint64_t count) {
        gpu_->Zero(GpuDriver::Stream::kCompute, const_cast<float*>(scales), count * sizeof(float));
      });
  gpu_->RaiseScales(IndexIn(kernels::MasterFormats(), As<ScaleTask>(tasks.front()).master),
                    ItemsOf<DeviceCopy>(BatchGroups::kScales), static_cast<int>(tasks.size()),
                    given_[BatchGroups::kScales].tiles);
}

void GpuStaging::LaunchServes() {
  const Tasks tasks = groups_[BatchGroups::kServes];
  if (tasks.empty()) return;
  const auto& front = As<EncodeWeightsTask>(tasks.front());
  gpu_->EncodeWeights(IndexIn(kernels::MasterFormats(), front.master), ItemsOf<DeviceCopy>(BatchGroups::kServes),
                      static_cast<int>(tasks.size()), given_[BatchGroups::kServes].tiles, front.format);
  // Copied in the kernels' stream, since the tensor's next ScaleTask may already be at work when results go out.
  std::byte* to = device_ + scales_;
  GiveStretches(
      tasks,
      [](const DeviceTask* one) {
        const auto& task = As<EncodeWeightsTask>(one);
        const Rows rows = RowsOf(task);
        return absl::MakeConstSpan(task.scales + rows.first, rows.count);
      },
      [this, &to](const float* scales, uint64_t count) {
        gpu_->Copy(GpuDriver::Stream::kCompute, to, scales, count * sizeof(float));
        to += count * sizeof(float);
      });
}

void GpuStaging::Launch() {
  LaunchSums();
  OfKindOfGradients([this]<class Task>() {
    LaunchGradients(gpu_, groups_[BatchGroups::kGradients], ItemsOf<ItemOfKind<Task>>(BatchGroups::kGradients),
                    given_[BatchGroups::kGradients].tiles);
  });
  LaunchAverages();
  if (reads_aside_) AwaitSaves();
  LaunchScales();
  LaunchServes();
}

void GpuStaging::Give(bool* summed) {
  if (const Tasks alone = groups_[BatchGroups::kAlone]; !alone.empty()) {
    GiveAlone(*alone.front());
  } else if (!groups_.empty()) {
    Prepare();
    if (!gradients_.empty() && std::exchange(*summed, false)) AwaitSums();
    BringGradients();
    *summed |= !groups_[BatchGroups::kSums].empty();
    StartCompute();
    Launch();
    StartOut();
    CopyOut(tiles_, tile_bytes_);
    CopyOut(payload_ + arriving_bytes_, payload_bytes_);
    CopyOut(scales_, scale_bytes_);
  }
  gpu_->Record(out_, GpuDriver::Stream::kOut);
}

void GpuStaging::GiveAlone(const DeviceTask& task) {
  if (const auto* load = std::get_if<LoadTask>(&task)) return GiveLoad(*load);
  GiveCopy(std::get<CopyTask>(task));
}

void GpuStaging::GiveLoad(const LoadTask& task) {
  const uint64_t bytes = (task.last - task.first) * WireBytes(task.format);
  std::memcpy(host_ + payload_, task.in, bytes);
  gpu_->Copy(GpuDriver::Stream::kIn, device_ + payload_, host_ + payload_, bytes);
  DeviceCopy* const item = NewItems<DeviceCopy>(BatchGroups::kAlone);
  *item = CopyOf(task.planes, task.first, task.last);
  item->payload = device_ + payload_;
  item->refused = OnDevice<uint32_t>(0);
  StartCompute();
  gpu_->Zero(GpuDriver::Stream::kCompute, device_, sizeof(uint32_t));
  gpu_->Load(IndexIn(kernels::MasterFormats(), task.master), ItemsOf<DeviceCopy>(BatchGroups::kAlone), 1,
             TilesOf(task.last - task.first), task.format);
  StartOut();
  CopyOut(0, sizeof(uint32_t));
}

uint64_t GpuStaging::RoomOfPiece(uint64_t bytes) { return AlignPart(bytes); }

}  // namespace ballast
