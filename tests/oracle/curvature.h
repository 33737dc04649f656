// The curvature probe (kernels/NUMERICS.md, "Curvature"), an element at a time, in double with a bound on what fp32
// makes of it; from the rules' own papers and the decoded state. Shares nothing with kernels/.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "tests/oracle/numbers.h"
#include "tests/oracle/rounded.h"
#include "tests/oracle/rules.h"

namespace ballast::oracle {

// mhat / (sqrt(vhat) + eps) of update t, and the denominator, which is the preconditioner's diagonal.
struct LastUpdate {
  Rounded u, p;
};

// StableAdamW's moments are debiased as they stand; Collage's numbers are bf16 ones.
inline LastUpdate LastUpdateOf(std::string_view rule, const Hypers& h, uint64_t t, Rounded m, Rounded v) {
  const bool collage = rule.starts_with("collage"), stands = rule == "stable_adamw";
  const auto number = [collage](double x) { return collage ? Nearest(x, kBf16) : x; };
  const double first = stands ? 1 : number(1 - Power(h.beta1, t));
  const double second = stands ? 1 : number(1 - Power(h.beta2, t));
  const Rounded p = Sqrt(v) * Constant(1 / std::sqrt(second)) + Constant(number(h.eps));
  return {m * Constant(1 / first) / p, p};
}

// What a sampled tile gives.
struct CurvatureSums {
  RoundedSum u_dg, u_pu;

  void Add(const LastUpdate& last, double grad, double before) {
    u_dg.Add(last.u * (Exact(grad) - Exact(before)));
    u_pu.Add(last.u * last.u * last.p);
  }
};

}  // namespace ballast::oracle
