// Divisions whose operands the caller answers for. Each gives what V::Div gives; a vector type that has a quicker way for
// such operands says so by a function of the same name (cuda/quick_vector.h).
#pragma once

#include "kernels/simd/vector.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// 1 / x, 2^-126 <= x <= 2^126.
template <class V>
BALLAST_FN typename V::F Inverse(typename V::F x) {
  if constexpr (requires { V::Inverse(x); }) {
    return V::Inverse(x);
  } else {
    return V::Div(V::Set(1.0f), x);
  }
}

// a / b of integers: |a| <= 128, 126 <= b <= 254.
template <class V>
BALLAST_FN typename V::F DivIntegers(typename V::F a, typename V::F b) {
  if constexpr (requires { V::DivIntegers(a, b); }) {
    return V::DivIntegers(a, b);
  } else {
    return V::Div(a, b);
  }
}

// a / b where a block's scale, from 2^-60 to 2^60, is one of the two, and a constant from 2^-8 to 2^8 the other, or where
// |a| <= b and b is a scale plus |a|: then a quotient below 2^-30 may be any other number below that. a may be 0.
template <class V>
BALLAST_FN typename V::F DivScales(typename V::F a, typename V::F b) {
  if constexpr (requires { V::DivScales(a, b); }) {
    return V::DivScales(a, b);
  } else {
    return V::Div(a, b);
  }
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
