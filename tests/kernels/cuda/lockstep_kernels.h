// The GPU's driver as it runs on a CPU (lockstep.h), in the registry's order. Payloads have room for whole rows of 256
// elements; all else is as in kernels/registry.h.
#pragma once

#include <span>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/registry.h"

namespace ballast::kernels {

struct LockstepKernel {
  void (*update)(const Update& update, uint64_t first, uint64_t last, TileStatistics* stats);
  // Of an update that IsOrdinary, in the way that the GPU has for these; where it has none, as `update`.
  void (*update_ordinary)(const Update& update, uint64_t first, uint64_t last, TileStatistics* stats);
  void (*measure)(const Update& update, uint64_t first, uint64_t last, float* sums);
  void (*curvature)(const CurvatureProbe& probe, uint64_t first, uint64_t last, TileCurvature* sums);
};
struct LockstepMaster {
  bool (*load)(std::byte* const* planes, WireIndex format, const std::byte* in, uint64_t first, uint64_t last);
  void (*encode_weights)(std::byte* const* planes, WireIndex format, const float* scales, uint64_t row_length,
                         std::byte* out, uint64_t first, uint64_t last);
  void (*raise)(std::byte* const* planes, float* scales, uint64_t row_length, uint64_t first, uint64_t last);
  void (*average)(const Average& average, uint64_t first, uint64_t last);
};

// WireFormat::measure.
void LockstepMeasure(WireIndex format, const std::byte* grad, uint64_t n, float scale, uint64_t first, uint64_t last,
                     TileStatistics* stats);

// One part, as the whole of a batch.
void LockstepSum(const DeviceSum& sum);

std::span<const LockstepKernel> LockstepKernels();
std::span<const LockstepMaster> LockstepMasters();

// What the last update or measure of this thread loaded and stored, without the warp's shared memory.
uint64_t LockstepBytesMoved();
// How many times so far a warp on this thread has taken a root with a look at its operand, 8 times a row of an update.
uint64_t LockstepCheckedRoots();

}  // namespace ballast::kernels
