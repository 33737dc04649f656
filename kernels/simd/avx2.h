// Eight floats in an AVX2 register. The operations are those of ScalarVector.
#pragma once

#include <immintrin.h>

#include "kernels/simd/vector.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct Avx2Vector {
  using F = __m256;
  using U = __m256i;
  using M = __m256i;  // all ones or zeros
  static constexpr int kWidth = 8;

  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static U LoadBits(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void StoreBits(uint32_t* p, U x) { StoreVector(p, x); }
  static F Set(float x) { return _mm256_set1_ps(x); }
  static U SetBits(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static U Ramp(uint32_t step) { return _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), SetBits(step)); }
  static U Gather(const uint32_t* table, U index) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), index, 4);
  }

  template <int Bytes, bool kSigned>
  static U LoadWords(const std::byte* p) {
    if constexpr (Bytes == 4) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    } else if constexpr (Bytes == 2) {
      const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return kSigned ? _mm256_cvtepi16_epi32(words) : _mm256_cvtepu16_epi32(words);
    } else {
      const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      return kSigned ? _mm256_cvtepi8_epi32(words) : _mm256_cvtepu8_epi32(words);
    }
  }
  template <int Bytes, bool kSigned, int kCount>
  static void StoreWords(std::byte* p, const U (&w)[kCount]) {
    static_assert(kCount == 4);
    if constexpr (Bytes == 4) {
      for (int i = 0; i < kCount; ++i) StoreVector(p + 32 * i, w[i]);
    } else {
      // Packing works on halves of registers; a permutation puts them in order again.
      const U low = kSigned || Bytes == 1 ? _mm256_packs_epi32(w[0], w[1]) : _mm256_packus_epi32(w[0], w[1]);
      const U high = kSigned || Bytes == 1 ? _mm256_packs_epi32(w[2], w[3]) : _mm256_packus_epi32(w[2], w[3]);
      if constexpr (Bytes == 2) {
        StoreVector(p, _mm256_permute4x64_epi64(low, 0xd8));
        StoreVector(p + 32, _mm256_permute4x64_epi64(high, 0xd8));
      } else {
        const U bytes = kSigned ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
        StoreVector(p, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
      }
    }
  }

  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static U Bits(F x) { return _mm256_castps_si256(x); }
  static F FromBits(U x) { return _mm256_castsi256_ps(x); }
  static F Abs(F x) { return FromBits(And(Bits(x), SetBits(kMagnitude))); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static M Less(F a, F b) { return Bits(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static M LessEqual(F a, F b) { return Bits(_mm256_cmp_ps(a, b, _CMP_LE_OQ)); }
  static M EqualBits(U a, U b) { return _mm256_cmpeq_epi32(a, b); }
  static M GreaterBits(U a, U b) { return _mm256_cmpgt_epi32(a, b); }
  static F Select(M m, F a, F b) { return _mm256_blendv_ps(b, a, FromBits(m)); }
  static U SelectBits(M m, U a, U b) { return _mm256_blendv_epi8(b, a, m); }
  static U IncrementIf(M m, U x) { return _mm256_sub_epi32(x, m); }

  static U AddBits(U a, U b) { return _mm256_add_epi32(a, b); }
  static U SubBits(U a, U b) { return _mm256_sub_epi32(a, b); }
  static U MulBits(U a, U b) { return _mm256_mullo_epi32(a, b); }
  static U And(U a, U b) { return _mm256_and_si256(a, b); }
  static U Or(U a, U b) { return _mm256_or_si256(a, b); }
  static U Xor(U a, U b) { return _mm256_xor_si256(a, b); }
  template <int N>
  static U ShiftLeft(U a) {
    return _mm256_slli_epi32(a, N);
  }
  template <int N>
  static U ShiftRight(U a) {
    return _mm256_srli_epi32(a, N);
  }
  template <int N>
  static U ShiftRightSigned(U a) {
    return _mm256_srai_epi32(a, N);
  }
  static U MaxBits(U a, U b) { return _mm256_max_epi32(a, b); }
  static U MinBits(U a, U b) { return _mm256_min_epi32(a, b); }
  static uint32_t Largest(U a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }
  static U Truncate(F x) { return _mm256_cvttps_epi32(x); }
  static F FromInteger(U x) { return _mm256_cvtepi32_ps(x); }

 private:
  static void StoreVector(void* p, U x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
