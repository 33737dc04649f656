// The vector type of a GPU thread. The 32 threads of a warp work on a row of 256 elements; each has 8 consecutive ones.
// All threads do an operation of ScalarVector at once, each on an element of its own. It also has the operations below,
// by which threads reach memory and each other; all threads call them together.
//
// The same operations for 32 threads side by side on a CPU are in tests/kernels/cuda/lockstep.h, where the code that is
// written over a warp's vector type is run against the CPU's kernels without a GPU.
#pragma once

#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr int kWarpThreads = 32;
inline constexpr int kEach = 8;  // elements of a row that a thread has

// The scale of each of a thread's elements, from `e` on: scales[element / row_length], 1 from `last` on.
BALLAST_FN void SpreadScales(const float* scales, uint64_t row_length, uint64_t e, uint64_t last, float* out) {
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = 1;
  if (e >= last) return;
  uint64_t row = e / row_length, rest = e - row * row_length;
  BALLAST_UNROLL for (int j = 0; j < kEach; ++j, ++rest) {
    if (e + static_cast<uint64_t>(j) >= last) break;
    if (rest == row_length) ++row, rest = 0;
    out[j] = scales[row];
  }
}

#ifdef __CUDACC__
struct WarpVector : ScalarVector {
  static __device__ uint32_t Thread() { return threadIdx.x % kWarpThreads; }

  // The first of the thread's elements in the row; the same times a step.
  static __device__ U Position() { return Thread() * kEach; }
  static __device__ U Ramp(uint32_t step) { return Position() * step; }

  // kWords words of each thread, of 32 bits, one thread's after another's; 0 where not. 8-byte aligned, or 16.
  template <int kWords>
  static __device__ void LoadVector(const std::byte* row, U (&w)[kWords]) {
    static_assert(kWords == 2 || kWords % 4 == 0);
    const std::byte* mine = row + Thread() * (4 * kWords);
    if constexpr (kWords == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(mine);
      w[0] = x.x, w[1] = x.y;
    } else {
      for (int i = 0; i < kWords; i += 4) {
        const uint4 x = reinterpret_cast<const uint4*>(mine)[i / 4];
        w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
      }
    }
  }
  template <int kWords>
  static __device__ void LoadVector(const std::byte* row, U (&w)[kWords], M where) {
    for (int i = 0; i < kWords; ++i) w[i] = 0;
    if (where) LoadVector(row, w);
  }
  template <int kWords>
  static __device__ void StoreVector(std::byte* row, const U (&w)[kWords], M where) {
    if (!where) return;
    std::byte* mine = row + Thread() * (4 * kWords);
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(mine) = make_uint2(w[0], w[1]);
    } else {
      for (int i = 0; i < kWords; i += 4) {
        reinterpret_cast<uint4*>(mine)[i / 4] = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
      }
    }
  }

  // One word of kBytes for every kPer elements of the row: the one of the thread's elements; from the first of them.
  template <uint32_t kBytes, uint32_t kPer>
  static __device__ U LoadScale(const std::byte* scales) {
    if constexpr (kBytes == 4) return reinterpret_cast<const uint32_t*>(scales)[Position() / kPer];
    return reinterpret_cast<const uint16_t*>(scales)[Position() / kPer];
  }
  template <uint32_t kBytes, uint32_t kPer>
  static __device__ void StoreScale(std::byte* scales, U scale, M where) {
    if (!where || Position() % kPer != 0) return;
    if constexpr (kBytes == 4) {
      reinterpret_cast<uint32_t*>(scales)[Position() / kPer] = scale;
    } else {
      reinterpret_cast<uint16_t*>(scales)[Position() / kPer] = static_cast<uint16_t>(scale);
    }
  }

  // The value that the thread has whose number differs in the bits of kMask.
  template <int kMask>
  static __device__ U Exchange(U x) {
    return __shfl_xor_sync(kAll, x, kMask);
  }
  static __device__ bool Any(M m) { return __any_sync(kAll, m); }
  static __device__ uint32_t Sum(U x) { return __reduce_add_sync(kAll, x); }
  static __device__ uint32_t Most(U x) { return __reduce_max_sync(kAll, x); }  // as unsigned integers

  static __device__ M Not(M a) { return !a; }
  static __device__ M Either(M a, M b) { return a || b; }
  static __device__ M Both(M a, M b) { return a && b; }

  // By one thread, its own value.
  static __device__ void StoreOnce(float* p, F x) {
    if (Thread() == 0) *p = x;
  }
  static __device__ void StoreOnce(uint32_t* p, uint32_t x) {
    if (Thread() == 0) *p = x;
  }

  static __device__ void LoadScales(const float* scales, uint64_t row_length, uint64_t row, uint64_t last,
                                    F (&out)[kEach]) {
    SpreadScales(scales, row_length, row + Position(), last, out);
  }
  // Raises scales[element / row_length] to |x|. Maxima of integers do not depend on the order.
  static __device__ void Raise(float* scales, uint64_t row_length, uint64_t row, uint64_t last,
                               const U (&magnitude)[kEach]) {
    const uint64_t e = row + Position();
    uint64_t of = e / row_length, rest = e - of * row_length;
    uint32_t most = 0;
    if (row + kWarpThreads * kEach <= last && row / row_length == (row + kWarpThreads * kEach - 1) / row_length) {
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) most = max(most, magnitude[j]);
      most = Most(most);  // one row of the tensor: one thread brings it
      if (Thread() == 0) Raise(scales + of, most);
      return;
    }
    if (e >= last) return;
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j, ++rest) {
      if (e + j >= last) break;
      if (rest == row_length) {
        Raise(scales + of, most);
        ++of, rest = 0, most = 0;
      }
      most = max(most, magnitude[j]);
    }
    Raise(scales + of, most);
  }

 private:
  static __device__ void Raise(float* scale, uint32_t magnitude) {
    atomicMax(reinterpret_cast<uint32_t*>(scale), magnitude);
  }
  static constexpr uint32_t kAll = 0xffffffffu;
};
#endif

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
