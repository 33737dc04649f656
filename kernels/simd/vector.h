// The types that the formulas are written over. A vector type V holds kWidth elements side by side and has the
// operations of ScalarVector (scalar.h), which defines them: Avx2Vector and Avx512Vector give the same bits, element
// for element. Every arithmetic operation is one IEEE-754 rounding to nearest even; nothing may be contracted or
// reassociated.
//
// BALLAST_UNIT names an inline namespace around all that a translation unit compiles for itself. Units with compiler
// options of their own set it: linkers merge equal functions, so code for a newer processor could end up in the unit
// for any processor, and a test could compare code with itself.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef BALLAST_UNIT
#define BALLAST_UNIT unit
#endif

// BALLAST_UNROLL stands before a loop whose arrays a GPU must hold in registers: they cannot be indexed by a variable.
#ifdef __CUDACC__
#define BALLAST_FN __host__ __device__ inline
#define BALLAST_UNROLL _Pragma("unroll")
#else
#define BALLAST_FN inline
#define BALLAST_UNROLL
#endif

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

inline constexpr uint32_t kSignBit = 0x80000000u;
inline constexpr uint32_t kMagnitude = 0x7fffffffu;
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
