// The GPU's driver over the vector type of lockstep.h, in a namespace of its own.
#include "tests/kernels/cuda/lockstep_kernels.h"

#include <array>

#include "kernels/cuda/warp_codecs.h"
#include "kernels/cuda/warp_curvature.h"
#include "kernels/cuda/warp_gradient.h"
#include "kernels/cuda/warp_kernels.h"
#include "kernels/cuda/warp_quick.h"
#include "kernels/cuda/warp_terms.h"
#include "tests/kernels/cuda/lockstep.h"

namespace ballast::kernels {
namespace {

template <class State>
void ProbeCurvature(const CurvatureProbe& probe, uint64_t first, uint64_t last, TileCurvature* out) {
  float rows[kProbeRows * kRow];
  WarpProbe<LockstepVector, State> warp(probe, rows);
  for (uint64_t i = first; i < last; ++i) warp.Run(i, out + (i - first));
}

template <class T>
struct Entry {
  using Tile = WarpTile<LockstepVector, typename T::Rule, typename T::Master, typename T::State>;

  using QuickTile = kernels::QuickTile<LockstepVector, typename T::Rule, typename T::Master, typename T::State>;

  template <class Work>
  static void Run(const kernels::Update& u, uint64_t first, uint64_t last, TileStatistics* stats) {
    float rows[Work::kRows * kRow];
    lockstep_traffic = {reinterpret_cast<std::byte*>(rows), reinterpret_cast<std::byte*>(std::end(rows)), 0};
    Work tile(u, rows);
    for (uint64_t i = first; i < last; ++i) tile.Run(i, stats + (i - first));
  }
  static void Measure(const kernels::Update& u, uint64_t first, uint64_t last, float* out) {
    float rows[kWarpRows * kRow];
    lockstep_traffic = {reinterpret_cast<std::byte*>(rows), reinterpret_cast<std::byte*>(std::end(rows)), 0};
    Tile tile(u, rows);
    for (uint64_t i = first; i < last; ++i) LockstepVector::StoreOnce(out + (i - first), tile.Measure(i));
  }
  static constexpr LockstepKernel Table() {
    LockstepKernel kernel{&Run<Tile>, &Run<Tile>, nullptr, nullptr};
    if constexpr (kHasQuick<T>) kernel.update_ordinary = &Run<QuickTile>;
    if constexpr (T::Rule::kTwoPass) kernel.measure = &Measure;
    if constexpr (T::Rule::kHasRms) kernel.curvature = &ProbeCurvature<typename T::State>;
    return kernel;
  }
};

template <class Format>
struct Codec {
  using Rows = WarpCodec<LockstepVector, Format>;

  static bool Load(std::byte* const* planes, WireIndex format, const std::byte* in, uint64_t first, uint64_t last) {
    bool finite = true;
    WithWire(format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kGradient) {
        const auto each = [&](auto row) {
          for (uint64_t e = first; e < last; e += kRow)
            row(in + (e - first) * Wire::kBytes, e, std::min(kRow, last - e));
        };
        each([&](auto* at, uint64_t, uint64_t n) { finite = Rows::template FiniteRow<Wire>(at, n) && finite; });
        if (finite) each([&](auto* at, uint64_t e, uint64_t n) { Rows::template LoadRow<Wire>(planes, at, e, n); });
      }
    });
    return finite;
  }
  static void EncodeWeights(std::byte* const* planes, WireIndex format, const float* scales, uint64_t row_length,
                            std::byte* out, uint64_t first, uint64_t last) {
    WithWire(format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kServing) {
        for (uint64_t e = first; e < last; e += kRow) {
          Rows::template EncodeRow<Wire>(planes, scales, row_length, out + (e - first) * Wire::kBytes, e, last);
        }
      }
    });
  }
  static void Raise(std::byte* const* planes, float* scales, uint64_t row_length, uint64_t first, uint64_t last) {
    for (uint64_t e = first; e < last; e += kRow) Rows::RaiseRow(planes, scales, row_length, e, last);
  }
  static void Move(const Average& average, uint64_t first, uint64_t last) {
    const uint64_t end = std::min(average.n, last * kTile);
    for (uint64_t e = first * kTile; e < end; e += kRow) Rows::AverageRow(average, e, std::min(kRow, end - e));
  }
};

template <class... Ts>
constexpr auto KernelsOf(List<Ts...>) {
  return std::array{Entry<Ts>::Table()...};
}
template <class... Ms>
constexpr auto MastersOf(List<Ms...>) {
  return std::array{
      LockstepMaster{&Codec<Ms>::Load, &Codec<Ms>::EncodeWeights, &Codec<Ms>::Raise, &Codec<Ms>::Move}...};
}

}  // namespace

void LockstepMeasure(WireIndex format, const std::byte* grad, uint64_t n, float scale, uint64_t first, uint64_t last,
                     TileStatistics* stats) {
  float row[kRow];
  WithWire(format, WireList{}, [&]<class Wire>() {
    if constexpr (Wire::kGradient) {
      for (uint64_t tile = first; tile < last; ++tile) {
        MeasureGradientTile<LockstepVector, Wire>(grad, n, scale, tile, row, stats + (tile - first));
      }
    }
  });
}

void LockstepSum(const DeviceSum& sum) {
  for (uint64_t tile = 0; tile < TilesOf(sum.n); ++tile) SumTermsInTile<LockstepVector>(sum, tile);
}

std::span<const LockstepKernel> LockstepKernels() {
  static constexpr auto kTable = KernelsOf(TripleList{});
  return kTable;
}
uint64_t LockstepBytesMoved() { return lockstep_traffic.bytes; }
uint64_t LockstepCheckedRoots() { return lockstep_checked_roots; }

std::span<const LockstepMaster> LockstepMasters() {
  static constexpr auto kTable = MastersOf(MasterList{});
  return kTable;
}

}  // namespace ballast::kernels
