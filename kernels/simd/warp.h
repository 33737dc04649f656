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

  // kWords words of each thread, of 32 bits, one thread's after another's; 0 where not. 8-byte aligned, or 16. The row is
  // in the device's memory.
  template <int kWords>
  static __device__ void LoadVector(const std::byte* row, U (&w)[kWords]) {
    static_assert(kWords == 2 || kWords % 4 == 0);
    const std::byte* mine = OnDevice(row) + Thread() * (4 * kWords);
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
    std::byte* mine = OnDevice(row) + Thread() * (4 * kWords);
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(mine) = make_uint2(w[0], w[1]);
    } else {
      for (int i = 0; i < kWords; i += 4) {
        reinterpret_cast<uint4*>(mine)[i / 4] = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
      }
    }
  }

  // Has the cache load what LoadVector() of so many bytes a thread, at this row, is to read later.
  static __device__ void Prefetch(const std::byte* row, uint32_t bytes) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(OnDevice(row) + Thread() * bytes));
  }

  // The words of a row of elements of so many bytes, 1, 2 or 4, one thread's after another's; 16-byte aligned. What is
  // behind them in w may be anything. Always the same load first, so that no load waits for another.
  static __device__ void LoadElements(const std::byte* row, uint32_t bytes, U (&w)[kEach]) {
    const uint32_t at = Thread() * kEach * bytes;
    const uint4* const mine = reinterpret_cast<const uint4*>(OnDevice(row) + at / 16 * 16);
    const uint4 x = mine[0];
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    if (bytes == 4) {
      const uint4 y = mine[1];
      w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
    } else if (at % 16 != 0) {  // two threads share the 16 bytes
      w[0] = w[2], w[1] = w[3];
    }
  }

  // The thread's own kEach words of a row in shared memory, which no other thread reads: laid out so that the threads
  // that are served together meet different banks.
  static __device__ void LoadOwn(const std::byte* row, U (&w)[kEach]) {
    BALLAST_UNROLL for (int i = 0; i < kEach; i += 4) {
      const uint4 x = reinterpret_cast<const uint4*>(row)[i / 4 * kWarpThreads + Thread()];
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    }
  }
  static __device__ void StoreOwn(std::byte* row, const U (&w)[kEach], M where) {
    if (!where) return;
    BALLAST_UNROLL for (int i = 0; i < kEach; i += 4) {
      reinterpret_cast<uint4*>(row)[i / 4 * kWarpThreads + Thread()] = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
    }
  }

  // Byte kByte, extended by its sign.
  template <int kByte>
  static __device__ U SignedByte(U word) {
    U x;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(x) : "r"(word), "n"(0x8880 + 0x1111 * kByte));
    return x;
  }
  // Byte kByte of a and, above it, of b; what is above both does not matter. The same of halves.
  template <int kByte>
  static __device__ U JoinBytes(U a, U b) {
    return __byte_perm(a, b, 0x40 + 0x11 * kByte);
  }
  template <int kHalf>
  static __device__ U JoinHalves(U a, U b) {
    return __byte_perm(a, b, 0x5410 + 0x2222 * kHalf);
  }
  // The larger of |a| and |b|; NaN where one is.
  static __device__ F MaxMagnitude(F a, F b) {
    F x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(fabsf(a)), "f"(fabsf(b)));
    return x;
  }

  // One word of kBytes for every kPer elements of the row: the one of the thread's elements; from the first of them.
  template <uint32_t kBytes, uint32_t kPer>
  static __device__ U LoadScale(const std::byte* scales) {
    if constexpr (kBytes == 4) return reinterpret_cast<const uint32_t*>(OnDevice(scales))[Position() / kPer];
    return reinterpret_cast<const uint16_t*>(OnDevice(scales))[Position() / kPer];
  }
  template <uint32_t kBytes, uint32_t kPer>
  static __device__ void StoreScale(std::byte* scales, U scale, M where) {
    if (!where || Position() % kPer != 0) return;
    if constexpr (kBytes == 4) {
      reinterpret_cast<uint32_t*>(OnDevice(scales))[Position() / kPer] = scale;
    } else {
      reinterpret_cast<uint16_t*>(OnDevice(scales))[Position() / kPer] = static_cast<uint16_t>(scale);
    }
  }

  // The value that the thread has whose number differs in the bits of kMask.
  template <int kMask>
  static __device__ U Exchange(U x) {
    return __shfl_xor_sync(kAll, x, kMask);
  }
  // 1 / x and 1 / sqrt(x), x normal, to about one unit in the last place.
  static __device__ F NearInverse(F x) {
    F y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ F NearInverseRoot(F x) {
    F y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ U LeastUnsigned(U a, U b) { return min(a, b); }
  static __device__ M LessUnsigned(U a, U b) { return a < b; }
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
  // Tells the compiler where the pointer points to.
  template <class T>
  static __device__ T* OnDevice(T* p) {
    __builtin_assume(__isGlobal(p));
    return p;
  }
  static __device__ void Raise(float* scale, uint32_t magnitude) {
    atomicMax(reinterpret_cast<uint32_t*>(scale), magnitude);
  }
  static constexpr uint32_t kAll = 0xffffffffu;
};
#endif

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
