// How a kernel is launched: as many warps as the device holds at once, or as there are tiles, if these are fewer.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/simd/warp.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr int kWarpsPerGroup = 4;
inline constexpr int kGroupThreads = kWarpsPerGroup * kWarpThreads;

// How many thread groups of `kernel` the current device holds at once; asked once for each device and kernel.
template <auto kKernel>
cudaError_t ResidentGroups(int* groups) {
  constexpr int kDevices = 64;
  static int known[kDevices];  // zero: not yet; every thread would write the same
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  int& mine = known[device % kDevices];
  if (__atomic_load_n(&mine, __ATOMIC_RELAXED) == 0) {
    int processors = 0, each = 0;
    cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kKernel, kGroupThreads, 0);
    if (error != cudaSuccess) return error;
    __atomic_store_n(&mine, std::max(1, processors * each), __ATOMIC_RELAXED);
  }
  *groups = __atomic_load_n(&mine, __ATOMIC_RELAXED);
  return cudaSuccess;
}

// `warps`: how many have something to do; none is no launch.
template <auto kKernel, class... Args>
cudaError_t Launch(uint64_t warps, cudaStream_t stream, Args... args) {
  if (warps == 0) return cudaSuccess;
  int groups = 0;
  if (cudaError_t error = ResidentGroups<kKernel>(&groups); error != cudaSuccess) return error;
  const uint64_t wanted = (warps + kWarpsPerGroup - 1) / kWarpsPerGroup;
  kKernel<<<static_cast<unsigned>(std::min<uint64_t>(static_cast<uint64_t>(groups), wanted)), kGroupThreads, 0,
            stream>>>(args...);
  return cudaGetLastError();
}

__device__ inline uint64_t WarpNumber() { return blockIdx.x * uint64_t{kWarpsPerGroup} + threadIdx.x / kWarpThreads; }
__device__ inline uint64_t WarpCount() { return gridDim.x * uint64_t{kWarpsPerGroup}; }

// The sum of a tensor's tiles, in index order in double; the same in all threads of the warp. None is negative.
__device__ inline double SumOfTiles(const float* sums, uint64_t tiles) {
  double sum = 0;
  for (uint64_t first = 0; first < tiles; first += kWarpThreads) {
    const uint64_t tile = first + threadIdx.x % kWarpThreads;
    const float mine = tile < tiles ? sums[tile] : 0.0f;  // + 0 changes nothing
    for (int t = 0; t < kWarpThreads; ++t) sum += static_cast<double>(__shfl_sync(0xffffffffu, mine, t));
  }
  return sum;
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
