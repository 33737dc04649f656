// Counter-based random bits: a function of (run seed, tensor name, step, element) alone, so that device, order,
// chunking and placement change no bit and a replay gives the same ones.
//
//   c = fmix64(key ^ fmix64(step)), key = xxh3_64(tensor name, seed = run seed); fmix64 is MurmurHash3's finaliser
//   for element e:  c' = c + (e >> 32) * 0x9E3779B97F4A7C15, c0 = low and c1 = high word of c'
//     x = c0 + low(e) * 0x9E3779B9;
//     x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= c1;  x ^= x >> 15;  x *= 0xD35A2D97;  x ^= x >> 15;
//     y = (x ^ c1) * 0x2C1B3C6D
//   m takes the low 16 bits of x, v the high 16, the master the high 8 (split24) or 16 (bf16) of y.
//
// Why 32-bit words: AVX2 has no 64-bit multiplication and GPUs build it from four. Against fmix64(c + e * golden), both
// words of an element to memory, in ns an element (tests/bench/random_bench; plain loops, AMD EPYC family 25 model 1,
// one thread, g++ 12.2, 2026-11-21; best of 9, two runs within 2 %):
//   AVX2 (-O3 -mavx2)   0.30 against 1.05: 0.29 of the time      SSE2 (-O3)   1.26 against 1.25: the same
//   not vectorised (-O2 -fno-tree-vectorize)   1.56 against 1.22: 1.27 times
#pragma once

#include <cstdint>

#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

BALLAST_FN uint64_t Fmix64(uint64_t k) {
  k ^= k >> 33;
  k *= 0xff51afd7ed558ccdULL;
  k ^= k >> 33;
  k *= 0xc4ceb9fe1a85ec53ULL;
  k ^= k >> 33;
  return k;
}

// The words of the elements around `e`: those that share the upper half of e's index.
template <class V>
class RandomStream {
 public:
  BALLAST_FN RandomStream(uint64_t c, uint64_t e) {
    const uint64_t keyed = c + (e >> 32) * 0x9E3779B97F4A7C15ULL;
    const uint32_t c1 = static_cast<uint32_t>(keyed >> 32);
    c1_ = V::SetBits(c1);
    c1_shifted_ = V::SetBits(c1 ^ c1 >> 15);
    start_ = V::AddBits(V::SetBits(static_cast<uint32_t>(keyed)), V::Ramp(kGolden));
  }

  // x of elements e, e+1, ..., one in each position of the vector; and the y that belongs to an x.
  BALLAST_FN typename V::U At(uint64_t e) const { return Mixed(Counter(e)); }
  BALLAST_FN typename V::U ForMaster(typename V::U x) const {
    return V::MulBits(V::Xor(x, c1_), V::SetBits(0x2C1B3C6Du));
  }

  // Writes x of `count` elements from e on, whole vectors of them.
  BALLAST_FN void Fill(uint64_t e, uint64_t count, uint32_t* words) const {
    auto counter = Counter(e);
    const auto step = V::SetBits(static_cast<uint32_t>(V::kWidth) * kGolden);
    for (uint64_t i = 0; i < count; i += V::kWidth) {
      V::StoreBits(words + i, Mixed(counter));
      counter = V::AddBits(counter, step);
    }
  }

 private:
  static constexpr uint32_t kGolden = 0x9E3779B9u;

  BALLAST_FN typename V::U Counter(uint64_t e) const {
    return V::AddBits(start_, V::SetBits(static_cast<uint32_t>(e) * kGolden));
  }
  BALLAST_FN typename V::U Mixed(typename V::U x) const {
    x = V::Xor(x, V::template ShiftRight<16>(x));
    x = V::MulBits(x, V::SetBits(0x21F0AAADu));
    x = V::Xor3(x, V::template ShiftRight<15>(x), c1_shifted_);  // x ^= c1 first
    x = V::MulBits(x, V::SetBits(0xD35A2D97u));
    return V::Xor(x, V::template ShiftRight<15>(x));
  }

  typename V::U start_, c1_, c1_shifted_;
};

// 128 + bits / 2^16, exactly; and (bits + 0.5) / 2^16, exactly, which is uniform in (0, 1).
template <class V>
BALLAST_FN typename V::F Dither(typename V::U bits16) {
  return V::FromBits(V::Or(bits16, V::Bits(V::Set(128.0f))));
}
template <class V>
BALLAST_FN typename V::F Uniform(typename V::U bits16) {
  return V::Sub(Dither<V>(bits16), V::Set(128.0f - 0x1p-17f));
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
