// How a run's steps are made: commit, clipping, policies, numbers of ranks and micro-batches.
#include <cmath>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

constexpr uint32_t kMostRanks = 64;
constexpr uint32_t kMostMicros = 1024;

absl::Status CheckKnown(const v1::RunSpec& spec) {
  const bool known = v1::CommitMode_IsValid(spec.commit()) && v1::Reduction_IsValid(spec.reduction()) &&
                     v1::NonfinitePolicy_IsValid(spec.nonfinite()) && v1::TornPolicy_IsValid(spec.on_torn()) &&
                     v1::LostRankPolicy_IsValid(spec.on_lost_rank());
  if (known) return absl::OkStatus();
  return InvalidArgumentError("commit, reduction, nonfinite, on_torn or on_lost_rank has a value this version lacks");
}

// The refusal of a setting that only a staged run can have.
absl::Status NeedsStaged(absl::string_view setting, absl::string_view fix) {
  return InvalidArgumentError(StrCat(setting,
                                     " needs commit = COMMIT_MODE_STAGED, which keeps all gradients of a step until "
                                     "they are judged, but commit is COMMIT_MODE_RELEASE: change commit, or ",
                                     fix));
}

absl::Status CheckRelease(const v1::RunSpec& spec) {
  if (spec.has_max_grad_norm()) {
    return NeedsStaged(StrCat("max_grad_norm = ", spec.max_grad_norm()), "leave max_grad_norm unset");
  }
  if (spec.dynamic_loss_scale()) {
    return NeedsStaged("dynamic_loss_scale = true", "leave it unset and give a constant StepBegin.loss_scale");
  }
  if (spec.spikes().action() == v1::SPIKE_ACTION_SKIP) {
    return NeedsStaged("spikes.action = SPIKE_ACTION_SKIP", "spikes.action");
  }
  if (spec.nonfinite() == v1::NONFINITE_POLICY_SKIP_STEP) {
    return NeedsStaged("nonfinite = NONFINITE_POLICY_SKIP_STEP",
                       "set nonfinite to NONFINITE_POLICY_SKIP_TENSOR or NONFINITE_POLICY_STOP");
  }
  return absl::OkStatus();
}

absl::Status CheckGradients(const v1::RunSpec& spec) {
  if (spec.commit() != v1::COMMIT_MODE_STAGED) RETURN_IF_ERROR(CheckRelease(spec));
  const double norm = spec.max_grad_norm();
  if (spec.has_max_grad_norm() && !(std::isfinite(norm) && norm > 0)) {
    return InvalidArgumentError(
        StrCat("max_grad_norm is ", norm, "; wanted: a finite number above 0; leave it unset for no clipping"));
  }
  const bool other_policy =
      spec.nonfinite() == v1::NONFINITE_POLICY_SKIP_TENSOR || spec.nonfinite() == v1::NONFINITE_POLICY_STOP;
  if (spec.dynamic_loss_scale() && other_policy) {
    return InvalidArgumentError(
        StrCat("dynamic_loss_scale = true skips every step with a non-finite gradient, but "
               "nonfinite = ",
               v1::NonfinitePolicy_Name(spec.nonfinite()),
               ": leave nonfinite unset, or set it to NONFINITE_POLICY_SKIP_STEP"));
  }
  return absl::OkStatus();
}

absl::Status CheckPart(absl::string_view field, double value, bool below1) {
  if (std::isfinite(value) && value > 0 && (!below1 || value < 1)) return absl::OkStatus();
  return InvalidArgumentError(
      StrCat("tensor_clip.", field, " is ", value, "; wanted: a finite number above 0", below1 ? " and below 1" : ""));
}

absl::Status TakeTensorClip(const v1::RunSpec& spec, RunSpec* made) {
  if (!spec.has_tensor_clip()) return absl::OkStatus();
  if (spec.has_max_grad_norm()) {
    return InvalidArgumentError(
        "tensor_clip and max_grad_norm are both given: the one clips each tensor by its own norm, the other all by the "
        "norm of them together; leave one of them out");
  }
  TensorClip::Options options;
  const v1::TensorClipSpec& clip = spec.tensor_clip();
  if (clip.has_absolute()) options.absolute = clip.absolute();
  if (clip.has_relative()) options.relative = clip.relative();
  if (clip.has_beta()) options.beta = clip.beta();
  if (clip.has_warmup_steps()) options.warmup = clip.warmup_steps();
  RETURN_IF_ERROR(CheckPart("absolute", options.absolute, false));
  RETURN_IF_ERROR(CheckPart("relative", options.relative, false));
  RETURN_IF_ERROR(CheckPart("beta", options.beta, true));
  made->tensor_clip = options;
  return absl::OkStatus();
}

absl::Status CheckCounts(const v1::RunSpec& spec) {
  if (!(spec.rank_timeout_s() >= 0 && spec.rank_timeout_s() <= 1e6)) {
    return InvalidArgumentError(
        StrCat("rank_timeout_s is ", spec.rank_timeout_s(), "; wanted: 0 (the default, 60) to 1000000 seconds"));
  }
  if (!(spec.step_timeout_s() >= 0 && spec.step_timeout_s() <= 1e6)) {
    return InvalidArgumentError(
        StrCat("step_timeout_s is ", spec.step_timeout_s(), "; wanted: 0 (the default, none) to 1000000 seconds"));
  }
  if (spec.accumulation() > kMostMicros) {
    return InvalidArgumentError(
        StrCat("accumulation is ", spec.accumulation(), "; wanted: at most ", kMostMicros, " micro-batches a step"));
  }
  if (spec.ranks() > kMostRanks) {
    return InvalidArgumentError(StrCat("ranks is ", spec.ranks(), "; wanted: at most ", kMostRanks));
  }
  return absl::OkStatus();
}

Nonfinite ToNonfinite(const v1::RunSpec& spec) {
  if (spec.nonfinite() == v1::NONFINITE_POLICY_STOP) return Nonfinite::kStop;
  const bool skips = spec.dynamic_loss_scale() || spec.nonfinite() == v1::NONFINITE_POLICY_SKIP_STEP;
  return skips ? Nonfinite::kSkipStep : Nonfinite::kSkipTensor;
}

}  // namespace

absl::Status TakePolicies(const v1::RunSpec& spec, RunSpec* made) {
  RETURN_IF_ERROR(CheckKnown(spec));
  RETURN_IF_ERROR(CheckGradients(spec));
  RETURN_IF_ERROR(CheckCounts(spec));
  RETURN_IF_ERROR(TakeTensorClip(spec, made));
  if (spec.ranks() != 0) made->ranks = spec.ranks();
  if (spec.accumulation() != 0) made->accumulation = spec.accumulation();
  if (spec.rank_timeout_s() != 0) made->rank_timeout_s = spec.rank_timeout_s();
  made->step_timeout_s = spec.step_timeout_s();
  made->leaves_out_lost = spec.on_lost_rank() == v1::LOST_RANK_POLICY_CONTINUE;
  if (spec.has_max_grad_norm()) made->max_grad_norm = spec.max_grad_norm();
  made->mean = spec.reduction() != v1::REDUCTION_SUM;
  made->staged = spec.commit() == v1::COMMIT_MODE_STAGED;
  made->dynamic_loss_scale = spec.dynamic_loss_scale();
  made->nonfinite = ToNonfinite(spec);
  return absl::OkStatus();
}

}  // namespace ballast
