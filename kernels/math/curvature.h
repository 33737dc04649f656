// One element of a curvature probe, over a lane type: registry.h has the formulas.
#pragma once

#include "kernels/registry.h"
#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// What an element adds to the two sums.
template <class L>
struct CurvatureTerms {
  typename L::F u_dg, u_pu;
};
template <class L>
BALLAST_FN CurvatureTerms<L> TermsOf(const Preconditioner& k, typename L::F m, typename L::F v, typename L::F grad,
                                     typename L::F before) {
  const auto p = L::Fma(L::Sqrt(v), L::Set(k.root_debias), L::Set(k.eps));
  const auto u = L::Div(L::Mul(m, L::Set(k.mean_debias)), p);
  return {L::Mul(u, L::Sub(grad, before)), L::Mul(L::Mul(u, u), p)};
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
