// The scalar lane: one float. The formulas in formats/ and rules/ are written over a lane type with these operations,
// so a vector lane or a GPU thread runs the very same text. Every operation is one IEEE-754 rounding to nearest even;
// nothing here may be contracted or reassociated.
//
// BALLAST_UNIT names an inline namespace around all that a translation unit compiles for itself. Units with compiler
// options of their own set it: linkers merge equal functions, so code for a newer processor could end up in the unit
// for any processor, and a test could compare code with itself. This is the only file of the kernels that looks at the
// compiler's target.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#ifndef BALLAST_UNIT
#define BALLAST_UNIT unit
#endif

#ifdef __CUDACC__
#define BALLAST_FN __host__ __device__ inline
#else
#define BALLAST_FN inline
#endif

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct ScalarLane {
  using F = float;     // values
  using U = uint32_t;  // bit patterns
  using M = bool;      // masks
  static constexpr int kWidth = 1;

  static BALLAST_FN F Load(const float* p) { return *p; }
  static BALLAST_FN void Store(float* p, F x) { *p = x; }
  static BALLAST_FN U LoadBits(const uint32_t* p) { return *p; }
  static BALLAST_FN void StoreBits(uint32_t* p, U x) { *p = x; }
  static BALLAST_FN F Set(float x) { return x; }
  static BALLAST_FN U SetBits(uint32_t x) { return x; }
  // Lane i holds x + i.
  static BALLAST_FN U Count(uint32_t x) { return x; }

#ifdef __CUDA_ARCH__
  static BALLAST_FN F Add(F a, F b) { return __fadd_rn(a, b); }
  static BALLAST_FN F Sub(F a, F b) { return __fsub_rn(a, b); }
  static BALLAST_FN F Mul(F a, F b) { return __fmul_rn(a, b); }
  static BALLAST_FN F Div(F a, F b) { return __fdiv_rn(a, b); }
  static BALLAST_FN F Sqrt(F a) { return __fsqrt_rn(a); }
  static BALLAST_FN F Fma(F a, F b, F c) { return __fmaf_rn(a, b, c); }
  static BALLAST_FN U Bits(F x) { return __float_as_uint(x); }
  static BALLAST_FN F FromBits(U x) { return __uint_as_float(x); }
#else
  static BALLAST_FN F Add(F a, F b) { return a + b; }
  static BALLAST_FN F Sub(F a, F b) { return a - b; }
  static BALLAST_FN F Mul(F a, F b) { return a * b; }
  static BALLAST_FN F Div(F a, F b) { return a / b; }
  static BALLAST_FN F Sqrt(F a) { return std::sqrt(a); }
  static BALLAST_FN F Fma(F a, F b, F c) { return std::fma(a, b, c); }
  static BALLAST_FN U Bits(F x) { return std::bit_cast<uint32_t>(x); }
  static BALLAST_FN F FromBits(U x) { return std::bit_cast<float>(x); }
#endif
  static BALLAST_FN F Abs(F x) { return FromBits(Bits(x) & 0x7fffffffu); }
  // a < b ? a : b, and so on; b where either is NaN.
  static BALLAST_FN F Min(F a, F b) { return a < b ? a : b; }
  static BALLAST_FN F Max(F a, F b) { return a > b ? a : b; }
  static BALLAST_FN M Less(F a, F b) { return a < b; }
  static BALLAST_FN M LessEqual(F a, F b) { return a <= b; }
  static BALLAST_FN M EqualBits(U a, U b) { return a == b; }
  static BALLAST_FN M GreaterBits(U a, U b) { return a > b; }  // as unsigned
  // By masks: a conditional would be made into branches, which keep a loop from being vectorized.
  static BALLAST_FN F Select(M m, F a, F b) { return FromBits(SelectBits(m, Bits(a), Bits(b))); }
  static BALLAST_FN U SelectBits(M m, U a, U b) { return b ^ ((a ^ b) & (0u - static_cast<uint32_t>(m))); }

  static BALLAST_FN U AddBits(U a, U b) { return a + b; }
  static BALLAST_FN U SubBits(U a, U b) { return a - b; }
  static BALLAST_FN U MulBits(U a, U b) { return a * b; }
  static BALLAST_FN U And(U a, U b) { return a & b; }
  static BALLAST_FN U Or(U a, U b) { return a | b; }
  static BALLAST_FN U Xor(U a, U b) { return a ^ b; }
  static BALLAST_FN U ShiftLeft(U a, int n) { return a << n; }
  static BALLAST_FN U ShiftRight(U a, int n) { return a >> n; }
  static BALLAST_FN U MaxBits(U a, U b) { return a > b ? a : b; }
  // Towards zero; x is an integer code, 0 <= x < 2^24, so every machine agrees.
  static BALLAST_FN U Truncate(F x) { return static_cast<uint32_t>(static_cast<int32_t>(x)); }
  static BALLAST_FN F FromInteger(U x) { return static_cast<float>(static_cast<int32_t>(x)); }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
