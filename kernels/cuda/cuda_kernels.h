// The kernels on NVIDIA GPUs: the registry's triples and masters, in its order, with its bits. Each function launches
// on the calling thread's current device, in a stream, and returns at once; it gives a cudaError_t, 0 when launched.
// One launch serves a batch of tensors, so that small ones do not cost a launch each.
//
// All pointers in batches and the batches themselves are memory of the device, 16-byte aligned (planes 64); payloads in
// either direction have room for whole rows of 256 elements. What is there past a tensor's end does not matter.
// Bits are those of the CPU, except those of a NaN, which reaches a statistic only where infinities cancel. Compute
// capability 8.0 or later. Thread-safe.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/registry.h"

struct CUstream_st;

namespace ballast::kernels {

using CudaStream = CUstream_st*;  // cudaStream_t

// One tensor of a batch. `first_tile`: the tiles of all tensors before it in the batch.
struct DeviceUpdate {
  Update update;
  uint64_t first_tile;
  TileStatistics* tiles;  // of each of its tiles, written
  float* sums;            // as many; used by rules of two passes
};

// Elements [first, last) of a tensor's master on their way out or in; first is a multiple of kBlock.
struct DeviceCopy {
  std::byte* planes[2];
  uint64_t first, last;
  uint64_t first_tile;  // counted from `first`
  std::byte* payload;
  float* scales;  // of the whole tensor; see MasterFormat::encode_weights
  uint64_t row_length;
  uint32_t* refused;  // of a load: 0 before; 1 after, and nothing is stored, if an element is NaN or infinite
};

// One tensor's gradient of a batch, to be measured; its format is one with `gradient`.
struct DeviceGradient {
  const void* grad;
  WireIndex format;
  float scale;  // g = RN(decoded * scale)
  uint64_t n;
  uint64_t first_tile;
  TileStatistics* tiles;  // of each of its tiles, written as in WireFormat::measure
};

// A part of a gradient of a batch, as the sum of what ranks sent of it. With `adds`, `to` is fp32, and the terms are added to
// it in their order: each to a sum that is rounded before the next. Where the sum begins (`first`), what was there is
// forgotten: the first term is what the sum is, to the bit, and without terms it is -0.0. Else `to` has the terms' format,
// and takes the one term as it is, or 0 without one. Formats are those with `gradient`. Of the last eight elements that
// the part has some of, those past its end may be read and written too.
struct DeviceSum {
  std::byte* to;
  uint64_t n;
  const std::byte* const* terms;
  int term_count;
  WireIndex format;  // of the terms
  bool adds, first;
  uint64_t first_tile;
};

// One tensor's probe of a batch. `first_tile` counts sampled tiles.
struct DeviceCurvature {
  CurvatureProbe probe;
  uint64_t first_tile;
  TileCurvature* tiles;  // of each of its sampled tiles, written
};

// Elements [first, last) of one tensor's average of a batch; first is a multiple of kTile.
struct DeviceAverage {
  Average average;
  uint64_t first, last;
  uint64_t first_tile;  // counted from `first`
};

// An update as training asks for it: it stores, with the statistics kCore.
inline bool IsOrdinary(const Update& u) { return u.statistics == StatisticsLevel::kCore && !u.dry; }

struct CudaKernel {
  // Both passes, where the rule has two; then `constants` in the batch are those of the second. Of a rule over matrices
  // the second alone. ordinary: every update of the batch is; it takes less time then, and gives the same bits.
  int (*update)(DeviceUpdate* batch, int count, uint64_t tiles, bool ordinary, CudaStream stream);
  // The first pass of a rule over matrices, else nullptr; what comes between the two: cuda_orthogonalizer.h.
  int (*direct)(const DeviceUpdate* batch, int count, uint64_t tiles, CudaStream stream);
  // As Kernel::curvature, for a batch with so many sampled tiles; nullptr where that is. Kernels with the same
  // Kernel::curvature share it.
  int (*curvature)(const DeviceCurvature* batch, int count, uint64_t tiles, CudaStream stream);
};
struct CudaMaster {
  // Each call works on one batch, all of it in wire format `format`.
  int (*load)(const DeviceCopy* batch, int count, uint64_t tiles, WireIndex format, CudaStream stream);
  int (*encode_weights)(const DeviceCopy* batch, int count, uint64_t tiles, WireIndex format, CudaStream stream);
  // Raises scales, which are >= 0 before.
  int (*raise_scales)(const DeviceCopy* batch, int count, uint64_t tiles, CudaStream stream);
  // As MasterFormat::average.
  int (*average)(const DeviceAverage* batch, int count, uint64_t tiles, CudaStream stream);
};

// Sums the parts of a batch, none of which overlaps another.
int CudaSum(const DeviceSum* batch, int count, uint64_t tiles, CudaStream stream);

// Measures the gradients of a batch in each of their tiles.
int CudaMeasure(const DeviceGradient* batch, int count, uint64_t tiles, CudaStream stream);

// Adds to *wrong how often a division or root of ordinary updates (cuda/quick_vector.h) differs from the checked one, over
// every mantissa and, of divisions of two numbers, some 270 million pairs.
int CudaCheckDivisions(uint32_t* wrong, CudaStream stream);

std::span<const CudaKernel> CudaKernels();
std::span<const CudaMaster> CudaMasters();

}  // namespace ballast::kernels
