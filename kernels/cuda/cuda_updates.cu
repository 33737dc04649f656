// The updates: one kernel for each triple, and two more for a rule of two passes. Compiled in BALLAST_PARTS parts, of
// which each has every so many-th triple, so that a machine's processors share the work.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_parts.h"
#include "kernels/cuda/warp_grid.h"
#include "kernels/cuda/warp_kernels.h"
#include "kernels/cuda/warp_quick.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// 128 threads of at most 168 registers: 12 warps a multiprocessor, each with eight independent elements a thread. 8
// warps where the master's formulas need more than that.
template <class T>
inline constexpr int kGroupsPerProcessor = requires {
  T::Master::kManyRegisters;
}
? 2 : 3;

// The warp's copy of what is the same for a tensor, in shared memory.
__device__ inline void CopyUpdate(const Update& from, Update* to) {
  static_assert(sizeof(Update) % sizeof(uint32_t) == 0);
  __syncwarp();
  for (uint32_t i = WarpVector::Thread(); i < sizeof(Update) / sizeof(uint32_t); i += kWarpThreads) {
    reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(&from)[i];
  }
  __syncwarp();
}

template <class T>
using Tile = WarpTile<WarpVector, typename T::Rule, typename T::Master, typename T::State>;
template <class T>
using OrdinaryTile = QuickTile<WarpVector, typename T::Rule, typename T::Master, typename T::State>;

// Calls act(work, item, tile) for each tile of this warp; `work` is of the class Work.
template <class Work, class Act>
__device__ void ForTiles(const DeviceUpdate* batch, int count, uint64_t tiles, Act&& act) {
  __shared__ alignas(16) float rows[kWarpsPerGroup][Work::kRows * kRow];
  __shared__ Update updates[kWarpsPerGroup];
  __shared__ const DeviceUpdate* current[kWarpsPerGroup];  // whose they are: not a register's worth
  const uint32_t mine = threadIdx.x / kWarpThreads;
  Work work(updates[mine], rows[mine]);
  if (WarpVector::Thread() == 0) current[mine] = nullptr;
  __syncwarp();
  ForTilesOfWarp(batch, count, tiles, WarpNumber(), WarpCount(), [&](const DeviceUpdate& item, uint64_t tile) {
    if (current[mine] != &item) {
      __syncwarp();  // all have looked
      if (WarpVector::Thread() == 0) current[mine] = &item;
      CopyUpdate(item.update, &updates[mine]);
    }
    act(work, item, tile);
  });
}

template <class T>
__global__ void __launch_bounds__(kGroupThreads, kGroupsPerProcessor<T>)
    UpdateTiles(const DeviceUpdate* batch, int count, uint64_t tiles) {
  ForTiles<Tile<T>>(batch, count, tiles,
                    [](auto& work, const DeviceUpdate& item, uint64_t tile) { work.Run(tile, item.tiles + tile); });
}

// 128 registers: 16 warps a multiprocessor. For compute capability 10 the compiler takes more: 12 warps.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kOrdinaryGroups = 3;
#else
inline constexpr int kOrdinaryGroups = 4;
#endif

template <class T>
__global__ void __launch_bounds__(kGroupThreads, kOrdinaryGroups)
    UpdateOrdinaryTiles(const DeviceUpdate* batch, int count, uint64_t tiles) {
  ForTiles<OrdinaryTile<T>>(batch, count, tiles, [](auto& work, const DeviceUpdate& item, uint64_t tile) {
    work.Run(tile, item.tiles + tile);
  });
}

template <class T>
__global__ void __launch_bounds__(kGroupThreads, kGroupsPerProcessor<T>)
    MeasureTiles(const DeviceUpdate* batch, int count, uint64_t tiles) {
  ForTiles<Tile<T>>(batch, count, tiles, [](auto& work, const DeviceUpdate& item, uint64_t tile) {
    WarpVector::StoreOnce(item.sums + tile, work.Measure(tile));
  });
}

// A warp a tensor: the sums of its tiles in index order, in double, and what follows from them.
template <class T>
__global__ void __launch_bounds__(kGroupThreads) FinishTensors(DeviceUpdate* batch, int count) {
  for (uint64_t i = WarpNumber(); i < static_cast<uint64_t>(count); i += WarpCount()) {
    DeviceUpdate& item = batch[i];
    const double sum = SumOfTiles(item.sums, TilesOf(item.update.n));
    if (WarpVector::Thread() == 0) T::Rule::Finish(sum, item.update.n, item.update.constants);
  }
}

template <class T>
int RunUpdate(DeviceUpdate* batch, int count, uint64_t tiles, bool ordinary, CudaStream stream) {
  if constexpr (T::Rule::kTwoPass && !kIsOverMatrix<typename T::Rule>) {
    cudaError_t error = Launch<&MeasureTiles<T>>(tiles, stream, batch, count, tiles);
    if (error == cudaSuccess) error = Launch<&FinishTensors<T>>(static_cast<uint64_t>(count), stream, batch, count);
    if (error != cudaSuccess) return error;
  }
  if constexpr (kHasQuick<T>) {
    if (ordinary) return Launch<&UpdateOrdinaryTiles<T>>(tiles, stream, batch, count, tiles);
  }
  return Launch<&UpdateTiles<T>>(tiles, stream, batch, count, tiles);
}

template <class T>
int RunDirect(const DeviceUpdate* batch, int count, uint64_t tiles, CudaStream stream) {
  return Launch<&MeasureTiles<T>>(tiles, stream, batch, count, tiles);
}

template <class... Ts>
void FillPart(List<Ts...>, CudaKernel* kernels) {
  const auto fill = [&]<class T, int kIndex>() {
    if constexpr (kIndex % kCudaParts == BALLAST_PART) {
      kernels[kIndex].update = &RunUpdate<T>;
      if constexpr (kIsOverMatrix<typename T::Rule>) kernels[kIndex].direct = &RunDirect<T>;
    }
  };
  [&]<int... I>(std::integer_sequence<int, I...>) { (fill.template operator()<Ts, I>(), ...); }
  (std::make_integer_sequence<int, sizeof...(Ts)>());
}

}  // namespace BALLAST_UNIT

template <>
void FillCudaPart<BALLAST_PART>(CudaKernel* kernels) {
  FillPart(TripleList{}, kernels);
}

}  // namespace ballast::kernels
