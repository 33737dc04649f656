// mcf8: Collage's two-component numbers (Yu et al., arXiv 2405.03637) of OCP's fp8, 2 bytes a weight: hi in e4m3, lo in
// e5m2, the weight their sum. e4m3 has the digits, e5m2 the range that what is left over needs: it is 2^-4 of the
// weight at most, and a second e4m3 ends at 2^-9. Within [2^-6, 464] as near as bf16 or nearer; below, to 2^-14 of
// 2^-6; beyond 464, where hi is at its largest, to three digits.
//
//   hi = e4m3(x), nearest;   lo = e5m2(x - hi), nearest or by 16 random bits
#pragma once

#include "kernels/formats/format.h"
#include "kernels/formats/small_float.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct Mcf8Master {
  static constexpr const char* kName = "mcf8";
  static constexpr StoredPlane kPlanes[] = {{"weight.hi", 1, 1}, {"weight.lo", 1, 1}};
  static constexpr bool kPaired = false;
  static constexpr bool kHasTwins = true;              // of what is halfway between two of hi
  static constexpr uint32_t kSaturated = 0x4761c000u;  // 448 + 57344: both at their largest

  template <class V>
  static BALLAST_FN typename V::F Decode(const Words<V>& w) {
    return V::Add(Fp8E4M3::Decode<V>(w.word[0]), Fp8E5M2::Decode<V>(w.word[1]));
  }
  template <class V, bool kStochastic>
  static BALLAST_FN Words<V> Encode(typename V::F x, typename V::U random) {
    const auto hi = Fp8E4M3::Encode<V>(x);
    const auto rest = V::Sub(x, Fp8E4M3::Decode<V>(hi));  // exact
    if constexpr (kStochastic) {
      return {{hi, Fp8E5M2::EncodeStochastic<V>(rest, V::template ShiftRight<16>(random))}};
    } else {
      return {{hi, Fp8E5M2::Encode<V>(rest)}};
    }
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
