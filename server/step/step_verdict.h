// What becomes of a staged step, from what its gradients measure: applied, with which clipping, skipped or aborted.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "server/spec/run_spec.h"
#include "server/step/step_machine.h"

namespace ballast {

// What a step's whole gradient measures, after the reduction and unscaling, before clipping.
struct GradientFindings {
  double norm = 0;  // L2; of the blocks of 32 without an element that is not finite
  uint64_t nonfinite_tensors = 0;
  uint32_t first_nonfinite = 0;  // where there are some
  std::string first_name = {};   // its name
};

// The coefficient that brings the norm to at most max_grad_norm: fp32(min(1, max / (norm + 1e-6))), as torch's
// clip_grad_norm_; 1 without one. 0 where the norm of finite gradients is too large for its sum.
float ClipCoefficient(std::optional<double> max_grad_norm, double norm);

// Judges a step by the run's policy. An infinite norm counts as a gradient that is not finite, unless the policy is
// kSkipTensor.
event::Verdict JudgeStep(const RunSpec& spec, uint64_t step, double loss_scale, const GradientFindings& found);

// In a run with Nonfinite::kStop, what ended the training, and the fix. Empty: nothing did.
std::string StopReason(const RunSpec& spec, uint64_t step, const GradientFindings& found);

}  // namespace ballast
