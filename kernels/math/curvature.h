// One element of a curvature probe, over a vector type: registry.h has the formulas.
#pragma once

#include "kernels/registry.h"
#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// What an element adds to the two sums.
template <class V>
struct CurvatureTerms {
  typename V::F u_dg, u_pu;
};
template <class V>
BALLAST_FN CurvatureTerms<V> TermsOf(const Preconditioner& k, typename V::F m, typename V::F v, typename V::F grad,
                                     typename V::F before) {
  const auto p = V::Fma(V::Sqrt(v), V::Set(k.root_debias), V::Set(k.eps));
  const auto u = V::Div(V::Mul(m, V::Set(k.mean_debias)), p);
  return {V::Mul(u, V::Sub(grad, before)), V::Mul(V::Mul(u, u), p)};
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
