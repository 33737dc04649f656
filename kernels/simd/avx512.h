// Sixteen floats in an AVX-512 register (F, BW, DQ, VL). The operations are those of ScalarVector.
#pragma once

#include <immintrin.h>

#include "kernels/simd/avx2.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct Avx512Vector {
  using F = __m512;
  using U = __m512i;
  using M = __mmask16;
  static constexpr int kWidth = 16;
  static constexpr bool kSaturatesBytes = true;  // as in AVX2

  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static U LoadBits(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void StoreBits(uint32_t* p, U x) { _mm512_storeu_si512(p, x); }
  static F Set(float x) { return _mm512_set1_ps(x); }
  static U SetBits(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static U Ramp(uint32_t step) {
    return _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), SetBits(step));
  }
  static U Gather(const uint32_t* table, U index) { return _mm512_i32gather_epi32(index, table, 4); }

  template <int Bytes, bool kSigned>
  static U LoadWords(const std::byte* p) {
    if constexpr (Bytes == 4) {
      return _mm512_loadu_si512(p);
    } else if constexpr (Bytes == 2) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      return kSigned ? _mm512_cvtepi16_epi32(words) : _mm512_cvtepu16_epi32(words);
    } else {
      const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return kSigned ? _mm512_cvtepi8_epi32(words) : _mm512_cvtepu8_epi32(words);
    }
  }
  template <int Bytes>
  static void StoreWords(std::byte* p, const U (&w)[2]) {
    if constexpr (Bytes == 4) {
      _mm512_storeu_si512(p, w[0]);
      _mm512_storeu_si512(p + 64, w[1]);
    } else if constexpr (Bytes == 1) {
      const U words = _mm512_permutex2var_epi16(w[0], EvenWords(), w[1]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtusepi16_epi8(words));
    } else {
      StoreFields<Bytes, 0>(p, w);
    }
  }

  // Bytes bytes of each, from bit kAt on.
  template <int Bytes, int kAt>
  static void StoreFields(std::byte* p, const U (&w)[2]) {
    U words = _mm512_permutex2var_epi16(w[0], kAt >= 16 ? OddWords() : EvenWords(), w[1]);
    if constexpr (Bytes == 2) {
      static_assert(kAt % 16 == 0);
      _mm512_storeu_si512(p, words);
    } else {
      if constexpr (kAt % 16 != 0) words = _mm512_srli_epi16(words, kAt % 16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(words));
    }
  }

  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
  static F Fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static U Bits(F x) { return _mm512_castps_si512(x); }
  static F FromBits(U x) { return _mm512_castsi512_ps(x); }
  static F Abs(F x) { return FromBits(And(Bits(x), SetBits(kMagnitude))); }
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static F WithSignOf(F x, F y) { return FromBits(Or(And(Bits(x), SetBits(kSignBit)), Bits(y))); }
  static F MaxOfNonNegative(F a, F b) { return FromBits(MaxBits(Bits(a), Bits(b))); }
  static M Less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static M LessEqual(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  static M EqualBits(U a, U b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static M GreaterBits(U a, U b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static F Select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
  static U SelectBits(M m, U a, U b) { return _mm512_mask_blend_epi32(m, b, a); }
  static U IncrementIf(M m, U x) { return _mm512_mask_add_epi32(x, m, x, SetBits(1)); }

  static U AddBits(U a, U b) { return _mm512_add_epi32(a, b); }
  static U SubBits(U a, U b) { return _mm512_sub_epi32(a, b); }
  static U MulBits(U a, U b) { return _mm512_mullo_epi32(a, b); }
  static U And(U a, U b) { return _mm512_and_si512(a, b); }
  static U Or(U a, U b) { return _mm512_or_si512(a, b); }
  static U Xor3(U a, U b, U c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
  static U Xor(U a, U b) { return _mm512_xor_si512(a, b); }
  template <int N>
  static U ShiftLeft(U a) {
    return _mm512_slli_epi32(a, N);
  }
  template <int N>
  static U ShiftRight(U a) {
    return _mm512_srli_epi32(a, N);
  }
  template <int N>
  static U ShiftRightSigned(U a) {
    return _mm512_srai_epi32(a, N);
  }
  static U MaxBits(U a, U b) { return _mm512_max_epi32(a, b); }
  static U MinBits(U a, U b) { return _mm512_min_epi32(a, b); }
  static uint32_t Largest(U a) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(a)); }
  // In the lower half of a register.
  static void LoadEight(const std::byte* p, U (&words)[1]) {
    words[0] = _mm512_zextsi256_si512(Avx2Vector::LoadWords<2, false>(p));
  }
  static void StoreEight(std::byte* p, const U (&words)[1]) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtepi32_epi16(_mm512_castsi512_si256(words[0])));
  }
  static void LargestOfEight(const uint32_t* vectors, U (&largest)[1]) {
    const auto half = [](const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    const auto folded = [&](int i) { return _mm256_max_epi32(half(vectors + 16 * i), half(vectors + 16 * i + 8)); };
    largest[0] = _mm512_zextsi256_si512(Avx2Vector::LargestOfEight(folded));
  }
  static M Either(M a, M b) { return static_cast<M>(a | b); }
  static bool Any(M m) { return m != 0; }
  static U Truncate(F x) { return _mm512_cvttps_epi32(x); }
  static F FromInteger(U x) { return _mm512_cvtepi32_ps(x); }

 private:
  // The numbers of the even and odd words of two registers.
  static U EvenWords() {
    return _mm512_setr_epi32(0x00020000, 0x00060004, 0x000a0008, 0x000e000c, 0x00120010, 0x00160014, 0x001a0018,
                             0x001e001c, 0x00220020, 0x00260024, 0x002a0028, 0x002e002c, 0x00320030, 0x00360034,
                             0x003a0038, 0x003e003c);
  }
  static U OddWords() { return _mm512_add_epi16(EvenWords(), _mm512_set1_epi16(1)); }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
