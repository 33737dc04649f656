// What processors do of each kind of task: a thread takes tiles [first, last), of kernels::kTile elements each; of a
// CurvatureTask, of its sampled tiles. Every tile's bits are a function of that tile alone.
//
// Pure; different tiles of a task may be done by different threads at once.
#pragma once

#include <cstdint>

#include "kernels/matrix/newton_schulz.h"
#include "kernels/registry.h"
#include "server/device/device.h"

namespace ballast {

uint64_t CpuTilesOf(const DeviceTask& task);
// What comes before the tiles, by one thread.
void PrepareTask(DeviceTask& task);
// Whether all tiles are measured before any is run: an update in two passes.
bool MeasuresFirst(const DeviceTask& task);
void MeasureTiles(const DeviceTask& task, uint64_t first, uint64_t last);
// Between the passes. share: has work done by all threads; only a kernel over matrices has some.
void EndMeasure(DeviceTask& task, const kernels::ShareWork& share);
// False: a NaN or infinity was met.
bool RunTiles(const DeviceTask& task, uint64_t first, uint64_t last);
// After all tiles, by one thread: what was measured. Lets go of what the task holds.
TaskResult ConcludeTask(DeviceTask& task);
// Has an update or measure use this room for its tiles, in place of its own.
void UseRoom(DeviceTask& task, kernels::TileStatistics* tiles);

}  // namespace ballast
