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

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
