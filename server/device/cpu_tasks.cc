#include "server/device/cpu_tasks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <variant>

#include "proto/checksum.h"

#include "server/device/fair_queue.h"
#include "server/spec/run_spec.h"

namespace ballast {
namespace {

using kernels::kTile;

// Maxima do not depend on the order in which they are taken.
void Raise(float* at, float value) {
  std::atomic_ref<float> most(*at);
  float seen = most.load(std::memory_order_relaxed);
  while (value > seen && !most.compare_exchange_weak(seen, value, std::memory_order_relaxed)) continue;
}

// --- tiles ------------------------------------------------------------------------------------------------------------

bool Run(const UpdateTask& t, uint64_t first, uint64_t last) {
  if (t.kernel->measure != nullptr) {  // it was summed to be measured
    t.kernel->update(t.update, first, last, t.tiles + first);
  } else {
    UpdateWithSums(t, first, last);
  }
  return true;
}
bool Run(const MeasureTask& t, uint64_t first, uint64_t last) {
  const auto measure = kernels::WireFormats()[static_cast<size_t>(t.format)].measure;
  measure(t.gradient, t.elements, t.scale, first, last, t.tiles + first);
  return true;
}
bool Run(const CurvatureTask& t, uint64_t first, uint64_t last) {
  t.kernel->curvature(t.probe, first, last, t.tiles + first);
  return true;
}
bool Run(const AverageTask& t, uint64_t first, uint64_t last) {
  const uint64_t begin = t.first / kTile;
  t.master->average(t.average, begin + first, begin + last);
  return true;
}
bool Run(const ScaleTask& t, uint64_t first, uint64_t last) {
  const uint64_t end = std::min(t.elements, last * kTile);
  for (uint64_t e = first * kTile; e < end;) {
    const uint64_t row = e / t.row_length, row_end = std::min(end, (row + 1) * t.row_length);
    Raise(t.scales + row, t.master->absmax(t.planes.data(), e, row_end));
    e = row_end;
  }
  return true;
}
bool Run(const EncodeWeightsTask& t, uint64_t first, uint64_t last) {
  const uint64_t begin = t.first + first * kTile;
  std::byte* out = t.out + (begin - t.first) * WireBytes(t.format);
  t.master->encode_weights(t.planes.data(), t.format, t.scales, t.row_length, out, begin,
                           std::min(t.last, t.first + last * kTile));
  return true;
}
bool Run(const LoadTask& t, uint64_t first, uint64_t last) {
  const uint64_t begin = t.first + first * kTile;
  const std::byte* in = t.in + (begin - t.first) * WireBytes(t.format);
  return t.master->load(t.planes.data(), t.format, in, begin, std::min(t.last, t.first + last * kTile));
}
// Copies the task's pieces one after another; a tile of words is 16 KiB.
bool Run(const CopyTask& t, uint64_t first, uint64_t last) {
  constexpr uint64_t kTileBytes = kTile * 4;
  uint64_t begin = first * kTileBytes, end = last * kTileBytes;
  for (const CopyTask::Piece& p : t.pieces) {
    if (begin < std::min(end, p.bytes)) std::memcpy(p.to + begin, p.from + begin, std::min(end, p.bytes) - begin);
    begin -= std::min(begin, p.bytes);
    end -= std::min(end, p.bytes);
  }
  return true;
}
bool Run(const SumTask& t, uint64_t first, uint64_t last) {
  RunSum(t, first * kTile, std::min(t.elements, last * kTile));
  return true;
}

// --- before and after -------------------------------------------------------------------------------------------------

void Prepare(const ScaleTask& t) { std::fill_n(t.scales, t.elements / t.row_length, 0.0f); }
void Prepare(const EncodeWeightsTask& t) {
  if (t.scales == nullptr || t.first == t.last) return;
  const uint64_t first = t.first / t.row_length, last = (t.last - 1) / t.row_length + 1;
  std::copy(t.scales + first, t.scales + last, t.scales_out);
}
template <class Task>
void Prepare(const Task&) {}

TaskResult Conclude(UpdateTask& t) {
  t.sums.reset();
  const bool full = t.update.statistics == kernels::StatisticsLevel::kFull;
  return {.statistics = kernels::Combine({t.tiles, kernels::TilesOf(t.update.n)}, full)};
}
TaskResult Conclude(MeasureTask& t) {
  return {.statistics = kernels::Combine({t.tiles, kernels::TilesOf(t.elements)}, /*full=*/false)};
}
TaskResult Conclude(CurvatureTask& t) {
  return {.curvature = kernels::Combine({t.tiles, kernels::SampledTiles(t.probe.n)})};
}
TaskResult Conclude(EncodeWeightsTask& t) {
  if (t.crc32c != nullptr) *t.crc32c = Crc32c({t.out, (t.last - t.first) * WireBytes(t.format)});
  return {};
}
TaskResult Conclude(SumTask& t) {
  t.terms.clear();
  return {};
}
template <class Task>
TaskResult Conclude(Task&) {
  return {};
}

}  // namespace

uint64_t CpuTilesOf(const DeviceTask& task) {
  const Extent extent = ExtentOf(task);
  return kernels::TilesOf(extent.last - extent.first);
}

void PrepareTask(DeviceTask& task) {
  std::visit([](auto& t) { Prepare(t); }, task);
}

bool MeasuresFirst(const DeviceTask& task) {
  const auto* update = std::get_if<UpdateTask>(&task);
  return update != nullptr && update->kernel->measure != nullptr;
}

void MeasureTiles(const DeviceTask& task, uint64_t first, uint64_t last) {
  const UpdateTask& t = std::get<UpdateTask>(task);
  MakeSums(t, first, last);
  t.kernel->measure(t.update, first, last, reinterpret_cast<float*>(t.tiles) + first);
}

void EndMeasure(DeviceTask& task, const kernels::ShareWork& share) {
  UpdateTask& t = std::get<UpdateTask>(task);
  kernels::Update& u = t.update;
  const float* const sums = reinterpret_cast<const float*>(t.tiles);
  const double sum = std::accumulate(sums, sums + kernels::TilesOf(u.n), 0.0);
  if (t.kernel->finish != nullptr) return t.kernel->finish(sum, u.n, u.constants);
  kernels::OrthogonalizeMatrix(kernels::FastestProduct(), u.rows, u.n / u.rows, sum, u.least_norm, u.direction, t.room,
                               share);
}

bool RunTiles(const DeviceTask& task, uint64_t first, uint64_t last) {
  return std::visit([&](const auto& t) { return Run(t, first, last); }, task);
}

TaskResult ConcludeTask(DeviceTask& task) {
  return std::visit([](auto& t) { return Conclude(t); }, task);
}

void UseRoom(DeviceTask& task, kernels::TileStatistics* tiles) {
  if (auto* update = std::get_if<UpdateTask>(&task)) update->tiles = tiles;
  if (auto* measure = std::get_if<MeasureTask>(&task)) measure->tiles = tiles;
}

}  // namespace ballast
