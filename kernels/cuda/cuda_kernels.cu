// Loading, serving, summing, measuring and probing on a GPU, and the table of all its kernels.
#include <array>
#include <utility>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_parts.h"
#include "kernels/cuda/quick_vector.h"
#include "kernels/cuda/warp_codecs.h"
#include "kernels/cuda/warp_curvature.h"
#include "kernels/cuda/warp_gradient.h"
#include "kernels/cuda/warp_grid.h"
#include "kernels/cuda/warp_terms.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// Calls act(item, first element of a row, elements of it) for each row of the warp's tiles.
template <class Act>
__device__ void ForRows(const DeviceCopy* batch, int count, uint64_t tiles, Act&& act) {
  ForTilesOfWarp(batch, count, tiles, WarpNumber(), WarpCount(), [&](const DeviceCopy& item, uint64_t tile) {
    const uint64_t begin = item.first + tile * kTile;
    const uint64_t end = item.last < begin + kTile ? item.last : begin + kTile;
    for (uint64_t first = begin; first < end; first += kRow) act(item, first, end - first < kRow ? end - first : kRow);
  });
}

template <class Wire>
__device__ std::byte* PayloadOf(const DeviceCopy& item, uint64_t element) {
  return item.payload + (element - item.first) * Wire::kBytes;
}

// The first of two launches of a load: looks at all before anything is stored.
template <class Format, class Wire>
__global__ void __launch_bounds__(kGroupThreads) CheckRows(const DeviceCopy* batch, int count, uint64_t tiles) {
  ForRows(batch, count, tiles, [](const DeviceCopy& item, uint64_t first, uint64_t n) {
    const bool finite = WarpCodec<WarpVector, Format>::template FiniteRow<Wire>(PayloadOf<Wire>(item, first), n);
    if (!finite) WarpVector::StoreOnce(item.refused, 1);
  });
}
template <class Format, class Wire>
__global__ void __launch_bounds__(kGroupThreads) LoadRows(const DeviceCopy* batch, int count, uint64_t tiles) {
  ForRows(batch, count, tiles, [](const DeviceCopy& item, uint64_t first, uint64_t n) {
    if (*item.refused != 0) return;
    WarpCodec<WarpVector, Format>::template LoadRow<Wire>(item.planes, PayloadOf<Wire>(item, first), first, n);
  });
}
template <class Format, class Wire>
__global__ void __launch_bounds__(kGroupThreads) ServeRows(const DeviceCopy* batch, int count, uint64_t tiles) {
  ForRows(batch, count, tiles, [](const DeviceCopy& item, uint64_t first, uint64_t) {
    WarpCodec<WarpVector, Format>::template EncodeRow<Wire>(item.planes, item.scales, item.row_length,
                                                            PayloadOf<Wire>(item, first), first, item.last);
  });
}
template <class Format>
__global__ void __launch_bounds__(kGroupThreads) RaiseRows(const DeviceCopy* batch, int count, uint64_t tiles) {
  ForRows(batch, count, tiles, [](const DeviceCopy& item, uint64_t first, uint64_t) {
    WarpCodec<WarpVector, Format>::RaiseRow(item.planes, item.scales, item.row_length, first, item.last);
  });
}

template <class Format>
__global__ void __launch_bounds__(kGroupThreads) AverageRows(const DeviceAverage* batch, int count, uint64_t tiles) {
  ForTilesOfWarp(batch, count, tiles, WarpNumber(), WarpCount(), [&](const DeviceAverage& item, uint64_t tile) {
    const uint64_t begin = item.first + tile * kTile;
    const uint64_t end = item.last < begin + kTile ? item.last : begin + kTile;
    for (uint64_t first = begin; first < end; first += kRow) {
      WarpCodec<WarpVector, Format>::AverageRow(item.average, first, end - first < kRow ? end - first : kRow);
    }
  });
}

__global__ void __launch_bounds__(kGroupThreads) SumTerms(const DeviceSum* batch, int count, uint64_t tiles) {
  ForTilesOfWarp(batch, count, tiles, WarpNumber(), WarpCount(),
                 [](const DeviceSum& item, uint64_t tile) { SumTermsInTile<WarpVector>(item, tile); });
}

__global__ void __launch_bounds__(kGroupThreads)
    MeasureGradients(const DeviceGradient* batch, int count, uint64_t tiles) {
  __shared__ alignas(16) float rows[kWarpsPerGroup][kRow];
  float* const row = rows[threadIdx.x / kWarpThreads];
  ForTilesOfWarp(batch, count, tiles, WarpNumber(), WarpCount(), [&](const DeviceGradient& item, uint64_t tile) {
    WithWire(item.format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kGradient) {
        MeasureGradientTile<WarpVector, Wire>(static_cast<const std::byte*>(item.grad), item.n, item.scale, tile, row,
                                              item.tiles + tile);
      }
    });
  });
}

// Compiled once for a state format: neither the master nor the rule takes part.
template <class State>
__global__ void __launch_bounds__(kGroupThreads) ProbeStates(const DeviceCurvature* batch, int count, uint64_t tiles) {
  __shared__ alignas(16) float rows[kWarpsPerGroup][kProbeRows * kRow];
  float* const mine = rows[threadIdx.x / kWarpThreads];
  ForTilesOfWarp(batch, count, tiles, WarpNumber(), WarpCount(), [&](const DeviceCurvature& item, uint64_t tile) {
    WarpProbe<WarpVector, State>(item.probe, mine).Run(tile, item.tiles + tile);
  });
}
template <class State>
int ProbeCurvature(const DeviceCurvature* batch, int count, uint64_t tiles, CudaStream stream) {
  return Launch<&ProbeStates<State>>(tiles, stream, batch, count, tiles);
}

// Each mantissa, and with it some divisors, by QuickVector and by the checked operations. Counts what differs.
__global__ void __launch_bounds__(kGroupThreads) CheckDivisions(uint32_t* wrong) {
  using V = WarpVector;
  using Q = QuickVector<V>;
  constexpr uint32_t kOne = 0x3f800000u, kMantissas = 1u << 23;
  const uint32_t all = gridDim.x * blockDim.x, mine = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t count = 0;
  const auto compare = [&](float quick, float checked) { count += V::Bits(quick) != V::Bits(checked) ? 1 : 0; };
  for (uint32_t i = mine; i < 2 * kMantissas; i += all) {
    const float x = V::FromBits(kOne + i);  // 1 to 4: both parities of the exponent
    compare(Q::Sqrt(x), V::Sqrt(x));
    compare(Q::Inverse(x), V::Div(1.0f, x));
    for (uint32_t k = 1; k <= 16; ++k) {
      const float b = V::FromBits(kOne + ((i * k + k) * 0x9E3779B9u) % kMantissas);
      compare(Q::DivScales(x, 4 * b), V::Div(x, 4 * b));
    }
  }
  for (int k = static_cast<int>(mine) - 128; k < 128; k += static_cast<int>(all)) {
    const float a = static_cast<float>(k), b = 254 - V::Abs(a);
    compare(Q::DivIntegers(a, b), V::Div(a, b));
  }
  compare(Q::Sqrt(0.0f), 0.0f);
  if (count > 0) atomicAdd(wrong, count);
}

template <class Format>
struct Codec {
  static int Load(const DeviceCopy* batch, int count, uint64_t tiles, WireIndex format, CudaStream stream) {
    cudaError_t error = cudaErrorInvalidValue;
    WithWire(format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kGradient) {
        error = Launch<&CheckRows<Format, Wire>>(tiles, stream, batch, count, tiles);
        if (error == cudaSuccess) error = Launch<&LoadRows<Format, Wire>>(tiles, stream, batch, count, tiles);
      }
    });
    return error;
  }
  static int EncodeWeights(const DeviceCopy* batch, int count, uint64_t tiles, WireIndex format, CudaStream stream) {
    cudaError_t error = cudaErrorInvalidValue;
    WithWire(format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kServing) error = Launch<&ServeRows<Format, Wire>>(tiles, stream, batch, count, tiles);
    });
    return error;
  }
  static int RaiseScales(const DeviceCopy* batch, int count, uint64_t tiles, CudaStream stream) {
    return Launch<&RaiseRows<Format>>(tiles, stream, batch, count, tiles);
  }
  static int Average(const DeviceAverage* batch, int count, uint64_t tiles, CudaStream stream) {
    return Launch<&AverageRows<Format>>(tiles, stream, batch, count, tiles);
  }
};

template <class... Ms>
constexpr auto MastersOf(List<Ms...>) {
  return std::array{
      CudaMaster{&Codec<Ms>::Load, &Codec<Ms>::EncodeWeights, &Codec<Ms>::RaiseScales, &Codec<Ms>::Average}...};
}

template <class T>
void SetProbe(CudaKernel* kernel) {
  if constexpr (T::Rule::kHasRms) kernel->curvature = &ProbeCurvature<typename T::State>;
}

template <class... Ts>
auto AllKernels(List<Ts...>) {
  std::array<CudaKernel, sizeof...(Ts)> kernels{};
  CudaKernel* next = kernels.data();
  (SetProbe<Ts>(next++), ...);
  [&]<int... I>(std::integer_sequence<int, I...>) { (FillCudaPart<I>(kernels.data()), ...); }
  (std::make_integer_sequence<int, kCudaParts>());
  return kernels;
}

}  // namespace BALLAST_UNIT

int CudaCheckDivisions(uint32_t* wrong, CudaStream stream) {
  constexpr uint64_t kThreads = uint64_t{1} << 20;
  return Launch<&CheckDivisions>(kThreads / kWarpThreads, stream, wrong);
}

std::span<const CudaKernel> CudaKernels() {
  static const auto kernels = AllKernels(TripleList{});
  return kernels;
}

std::span<const CudaMaster> CudaMasters() {
  static constexpr auto kMasters = MastersOf(MasterList{});
  return kMasters;
}

int CudaSum(const DeviceSum* batch, int count, uint64_t tiles, CudaStream stream) {
  return Launch<&SumTerms>(tiles, stream, batch, count, tiles);
}

int CudaMeasure(const DeviceGradient* batch, int count, uint64_t tiles, CudaStream stream) {
  return Launch<&MeasureGradients>(tiles, stream, batch, count, tiles);
}

}  // namespace ballast::kernels
