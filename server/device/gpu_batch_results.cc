// What a batch has made, in its staging: results of tasks, and weights on their way to where they are wanted.
#include <algorithm>

#include "proto/checksum.h"

#include "server/device/gpu_batch.h"
#include "server/spec/run_spec.h"

namespace ballast {

using kernels::TileCurvature;
using kernels::TileStatistics;

TaskResult GpuStaging::Take(const DeviceTask& task) {
  TaskResult result;
  const uint64_t at = taken_tiles_, tiles = RoomOf(task).tiles;
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

void GpuStaging::AddInPieces(const HostCopy& copy, uint64_t most, std::vector<HostCopy>* copies) {
  const uint64_t together = copy.crc32c != nullptr ? copy.bytes : most;
  for (uint64_t done = 0; done < copy.bytes; done += together) {
    copies->push_back({copy.to + done, copy.from + done, std::min(together, copy.bytes - done), copy.crc32c});
  }
}

void GpuStaging::AddCopies(uint64_t most, std::vector<HostCopy>* copies) const {
  const auto add = [&](void* to, uint64_t at, uint64_t bytes, uint32_t* crc32c) {
    AddInPieces({static_cast<std::byte*>(to), host_ + at, bytes, crc32c}, most, copies);
    if (bytes == 0 && crc32c != nullptr) *crc32c = Crc32c({});
  };
  uint64_t payload = payload_ + arriving_bytes_, scales = scales_;
  for (const DeviceTask* one : groups_[BatchGroups::kServes]) {
    const auto& task = std::get<EncodeWeightsTask>(*one);
    const BatchRoom room = RoomOf(*one);
    const uint64_t scale_bytes = room.scales * sizeof(float);
    if (!task.out_on_device) add(task.out, payload, (task.last - task.first) * WireBytes(task.format), task.crc32c);
    add(task.scales_out, scales, scale_bytes, nullptr);
    payload += room.payload_bytes;
    scales += scale_bytes;
  }
}

}  // namespace ballast
