#include "server/step/step_verdict.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// Which gradients are not finite; empty: all are.
std::string WhatIsNotFinite(const GradientFindings& found) {
  if (found.nonfinite_tensors == 0) {
    return std::isfinite(found.norm) ? "" : "the norm over all gradients is too large for a float";
  }
  const std::string others =
      found.nonfinite_tensors > 1 ? absl::StrCat(" and ", found.nonfinite_tensors - 1, " more have") : " has";
  return absl::StrCat("tensor ", found.first_nonfinite, " '", found.first_name, "'", others,
                      " a gradient with NaN or infinities");
}

}  // namespace

float ClipCoefficient(std::optional<double> max_grad_norm, double norm) {
  if (!max_grad_norm) return 1;
  return static_cast<float>(std::min(1.0, *max_grad_norm / (norm + 1e-6)));
}

event::Verdict JudgeStep(const RunSpec& spec, uint64_t step, double loss_scale, const GradientFindings& found) {
  const std::string what = WhatIsNotFinite(found);
  if (what.empty() || spec.nonfinite == Nonfinite::kSkipTensor) return {.step = step};
  if (spec.nonfinite == Nonfinite::kStop) {
    return {.step = step, .outcome = Outcome::kAborted, .reason = "nonfinite", .detail = StopReason(spec, step, found)};
  }
  if (!spec.dynamic_loss_scale) {
    return {.step = step, .outcome = Outcome::kSkipped, .reason = "nonfinite", .detail = what};
  }
  return {.step = step,
          .outcome = Outcome::kSkipped,
          .reason = "overflow",
          .detail = absl::StrCat(what, " at loss_scale ", loss_scale, "; lower it")};
}

std::string StopReason(const RunSpec& spec, uint64_t step, const GradientFindings& found) {
  if (spec.nonfinite != Nonfinite::kStop) return "";
  const std::string what = WhatIsNotFinite(found);
  if (what.empty()) return "";
  return absl::StrCat("run '", spec.run_id, "' is stopped (nonfinite = stop) since step ", step, ", in which ", what,
                      "; no later step begins: find the cause, and take the run back to a step before "
                      "(Rewind), where it keeps snapshots, or delete the run and create it again from weights you "
                      "trust");
}

}  // namespace ballast
