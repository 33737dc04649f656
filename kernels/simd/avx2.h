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
  static constexpr bool kSaturatesBytes = true;  // StoreWords<1> stores 255 of words up to 2^15 - 1 that are larger

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
  template <int Bytes>
  static void StoreWords(std::byte* p, const U (&w)[4]) {
    if constexpr (Bytes == 4) {
      for (int i = 0; i < 4; ++i) StoreVector(p + 32 * i, w[i]);
    } else {
      // Packing saturates, and works on halves of registers; a permutation puts them in order again.
      const U low = _mm256_packus_epi32(w[0], w[1]), high = _mm256_packus_epi32(w[2], w[3]);
      if constexpr (Bytes == 2) {
        StoreVector(p, _mm256_permute4x64_epi64(low, 0xd8));
        StoreVector(p + 32, _mm256_permute4x64_epi64(high, 0xd8));
      } else {
        StoreVector(p, BytesInOrder(_mm256_packus_epi16(low, high)));
      }
    }
  }

  // Bytes bytes of each, from bit kAt on.
  template <int Bytes, int kAt>
  static void StoreFields(std::byte* p, const U (&w)[4]) {
    if constexpr (Bytes == 2) {
      const auto field = [](U x) { return kAt == 16 ? ShiftRight<16>(x) : And(x, SetBits(0xffff)); };
      const U fields[4] = {field(w[0]), field(w[1]), field(w[2]), field(w[3])};
      StoreWords<2>(p, fields);
    } else {
      // Each register's four bytes of a half go to a place of their own.
      const auto bytes = [](U x, int to) {
        const int take = kAt / 8 | (kAt / 8 + 4) << 8 | (kAt / 8 + 8) << 16 | (kAt / 8 + 12) << 24, none = -1;
        const __m128i which =
            _mm_setr_epi32(to == 0 ? take : none, to == 1 ? take : none, to == 2 ? take : none, to == 3 ? take : none);
        return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(which));
      };
      const U all = Or(Or(bytes(w[0], 0), bytes(w[1], 1)), Or(bytes(w[2], 2), bytes(w[3], 3)));
      StoreVector(p, BytesInOrder(all));
    }
  }

  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
  static F Fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static U Bits(F x) { return _mm256_castps_si256(x); }
  static F FromBits(U x) { return _mm256_castsi256_ps(x); }
  static F Abs(F x) { return FromBits(And(Bits(x), SetBits(kMagnitude))); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F WithSignOf(F x, F y) { return FromBits(Or(And(Bits(x), SetBits(kSignBit)), Bits(y))); }
  static F MaxOfNonNegative(F a, F b) { return FromBits(MaxBits(Bits(a), Bits(b))); }
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
  static U Xor3(U a, U b, U c) { return Xor(Xor(a, b), c); }
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
  static void LoadEight(const std::byte* p, U (&words)[1]) { words[0] = LoadWords<2, false>(p); }
  static void StoreEight(std::byte* p, const U (&words)[1]) {
    const U packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words[0], words[0]), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // Transposes the vectors by pairs, taking maxima on the way: a third of the work of eight times Largest.
  static void LargestOfEight(const uint32_t* vectors, U (&largest)[1]) {
    largest[0] = LargestOfEight([vectors](int i) { return LoadBits(vectors + i * kWidth); });
  }
  template <class Vector>
  static U LargestOfEight(const Vector& vector) {
    U pair[4];
    for (int i = 0; i < 4; ++i) pair[i] = MaxOfHalves32(vector(2 * i), vector(2 * i + 1));
    const U low = MaxOfHalves64(pair[0], pair[1]), high = MaxOfHalves64(pair[2], pair[3]);
    return MaxBits(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
  }
  static M Either(M a, M b) { return Or(a, b); }
  static bool Any(M m) { return _mm256_testz_si256(m, m) == 0; }
  static U Truncate(F x) { return _mm256_cvttps_epi32(x); }
  static F FromInteger(U x) { return _mm256_cvtepi32_ps(x); }

 private:
  // Of four bytes of each register, half by half, to four of each in turn.
  static U BytesInOrder(U bytes) {
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static U MaxOfHalves32(U a, U b) { return MaxBits(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); }
  static U MaxOfHalves64(U a, U b) { return MaxBits(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)); }
  static void StoreVector(void* p, U x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
