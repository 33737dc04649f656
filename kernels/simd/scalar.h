// The scalar vector type: one float. It is the definition of a vector type's operations, and what a GPU thread runs.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/simd/vector.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct ScalarVector {
  using F = float;     // values
  using U = uint32_t;  // bit patterns and integers
  using M = bool;      // masks
  static constexpr int kWidth = 1;

  static BALLAST_FN F Load(const float* p) { return *p; }
  static BALLAST_FN void Store(float* p, F x) { *p = x; }
  static BALLAST_FN U LoadBits(const uint32_t* p) { return *p; }
  static BALLAST_FN void StoreBits(uint32_t* p, U x) { *p = x; }
  static BALLAST_FN F Set(float x) { return x; }
  static BALLAST_FN U SetBits(uint32_t x) { return x; }
  // Element i holds i * step.
  static BALLAST_FN U Ramp(uint32_t) { return 0; }
  static BALLAST_FN U Gather(const uint32_t* table, U index) { return table[index]; }

  // kWidth integers of Bytes bytes, extended by their sign or by zeros.
  template <int Bytes, bool kSigned>
  static BALLAST_FN U LoadWords(const std::byte* p) {
    U x = 0;
    std::memcpy(&x, p, Bytes);
    if constexpr (kSigned) x = static_cast<U>(Signed(x << (32 - 8 * Bytes)) >> (32 - 8 * Bytes));
    return x;
  }
  // A block of 32 integers as such words, extended by zeros; and bytes [kAt / 8, kAt / 8 + Bytes) of 32 integers.
  template <int Bytes, int kCount>
  static BALLAST_FN void StoreWords(std::byte* p, const U (&w)[kCount]) {
    for (int i = 0; i < kCount; ++i) std::memcpy(p + i * Bytes, &w[i], Bytes);
  }
  template <int Bytes, int kAt, int kCount>
  static BALLAST_FN void StoreFields(std::byte* p, const U (&w)[kCount]) {
    for (int i = 0; i < kCount; ++i) {
      const U field = w[i] >> kAt;
      std::memcpy(p + i * Bytes, &field, Bytes);
    }
  }

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
  // a b - c, and c - a b, in one rounding.
  static BALLAST_FN F Fms(F a, F b, F c) { return Fma(a, b, -c); }
  static BALLAST_FN F Fnma(F a, F b, F c) { return Fma(-a, b, c); }
  static BALLAST_FN F Abs(F x) { return FromBits(Bits(x) & kMagnitude); }
  // a < b ? a : b, and so on; b where either is NaN.
  static BALLAST_FN F Min(F a, F b) { return a < b ? a : b; }
  static BALLAST_FN F Max(F a, F b) { return a > b ? a : b; }
  // y, which is not negative, with the sign of x.
  static BALLAST_FN F WithSignOf(F x, F y) { return FromBits(Or(And(Bits(x), SetBits(kSignBit)), Bits(y))); }
  // Of finite values that are not negative, and not -0: integers are compared, which more of a processor's units can.
  static BALLAST_FN F MaxOfNonNegative(F a, F b) { return FromBits(MaxBits(Bits(a), Bits(b))); }
  static BALLAST_FN M Less(F a, F b) { return a < b; }
  static BALLAST_FN M LessEqual(F a, F b) { return a <= b; }
  static BALLAST_FN M EqualBits(U a, U b) { return a == b; }
  static BALLAST_FN M GreaterBits(U a, U b) { return Signed(a) > Signed(b); }
  static BALLAST_FN F Select(M m, F a, F b) { return m ? a : b; }
  static BALLAST_FN U SelectBits(M m, U a, U b) { return m ? a : b; }
  // x + 1 where m.
  static BALLAST_FN U IncrementIf(M m, U x) { return x + (m ? 1 : 0); }

  static BALLAST_FN U AddBits(U a, U b) { return a + b; }
  static BALLAST_FN U SubBits(U a, U b) { return a - b; }
  static BALLAST_FN U MulBits(U a, U b) { return a * b; }
  static BALLAST_FN U And(U a, U b) { return a & b; }
  static BALLAST_FN U Or(U a, U b) { return a | b; }
  static BALLAST_FN U Xor3(U a, U b, U c) { return Xor(Xor(a, b), c); }
  static BALLAST_FN U Xor(U a, U b) { return a ^ b; }
  template <int N>
  static BALLAST_FN U ShiftLeft(U a) {
    return a << N;
  }
  template <int N>
  static BALLAST_FN U ShiftRight(U a) {
    return a >> N;
  }
  // The sign bit is copied.
  template <int N>
  static BALLAST_FN U ShiftRightSigned(U a) {
    return static_cast<U>(Signed(a) >> N);
  }
  // As signed integers.
  static BALLAST_FN U MaxBits(U a, U b) { return Signed(a) > Signed(b) ? a : b; }
  static BALLAST_FN U MinBits(U a, U b) { return Signed(a) < Signed(b) ? a : b; }
  // The largest of the vector, as signed integers.
  static BALLAST_FN uint32_t Largest(U a) { return a; }
  // Eight 16-bit words, extended by zeros, and back; they fit. Wider vectors hold them in one.
  static void LoadEight(const std::byte* p, U (&words)[8]) {
    for (int i = 0; i < 8; ++i) words[i] = LoadWords<2, false>(p + 2 * i);
  }
  static void StoreEight(std::byte* p, const U (&words)[8]) {
    for (int i = 0; i < 8; ++i) std::memcpy(p + 2 * i, &words[i], 2);
  }
  // The largest of each of eight vectors that lie one after the other, as signed integers.
  static void LargestOfEight(const uint32_t* vectors, U (&largest)[8]) {
    std::memcpy(largest, vectors, sizeof largest);
  }
  static BALLAST_FN M Either(M a, M b) { return a || b; }
  static BALLAST_FN bool Any(M m) { return m; }
  // Towards zero, of |x| < 2^24, so that every machine agrees; and the signed integer's value.
  static BALLAST_FN U Truncate(F x) { return static_cast<U>(static_cast<int32_t>(x)); }
  static BALLAST_FN F FromInteger(U x) { return static_cast<float>(Signed(x)); }

 private:
  static BALLAST_FN int32_t Signed(U x) { return static_cast<int32_t>(x); }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
