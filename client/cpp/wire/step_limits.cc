#include "client/cpp/wire/step_limits.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ballast {
namespace {

// proto/PROTOCOL.md, "Rules and hyperparameters".
constexpr double kMostRate = 1e6;

absl::Status CheckShare(const char* name, const std::optional<double>& share) {
  if (!share || (*share >= 0 && *share <= 1)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("EndStep: ", name, " is ", *share, ", wanted a share, from 0 to 1"));
}

bool GivesValues(const GroupValues& group) {
  return group.lr || group.weight_decay || group.beta1 || group.beta2 || group.momentum;
}

}  // namespace

StepLimits::StepLimits(const v1::RunSpec& spec)
    : run_id_(spec.run_id()),
      most_micros_(std::max<uint32_t>(1, spec.accumulation())),
      staged_(spec.commit() == v1::COMMIT_MODE_STAGED),
      clips_tensors_(spec.has_tensor_clip()) {
  for (const v1::GroupSpec& group : spec.groups()) {
    groups_.push_back({.rule = group.rule(), .hyper = {group.hyper().begin(), group.hyper().end()}});
  }
}

absl::Status StepLimits::CheckValues(const std::string& at, const Group& group, const GroupValues& values) const {
  const struct {
    const char* name;
    const std::optional<double>& value;
    bool is_rate;  // else it is below 1
  } all[] = {{"lr", values.lr, true},
             {"weight_decay", values.weight_decay, true},
             {"beta1", values.beta1, false},
             {"beta2", values.beta2, false},
             {"momentum", values.momentum, false}};
  for (const auto& [name, value, is_rate] : all) {
    if (!value) continue;
    if (!group.hyper.empty() && !group.hyper.contains(name)) {
      const std::string has =
          absl::StrJoin(group.hyper, ", ", [](std::string* out, const auto& one) { *out += one.first; });
      return absl::InvalidArgumentError(
          absl::StrCat(at, ".", name, " is given, but its rule ", group.rule, " has only ", has));
    }
    if (*value >= 0 && (is_rate ? *value <= kMostRate : *value < 1)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(at, ".", name, " is ", *value, ", wanted at least 0 and ", is_rate ? "at most 1e6" : "below 1"));
  }
  return absl::OkStatus();
}

absl::Status StepLimits::CheckGroups(const char* call, absl::Span<const GroupValues> groups) const {
  if (groups.size() > groups_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(call, ": got values of ", groups.size(), " groups, the run has ", groups_.size()));
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    if (auto s = CheckValues(absl::StrCat(call, ": groups[", i, "]"), groups_[i], groups[i]); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status StepLimits::CheckMicros(const char* call, uint32_t micros) const {
  if (micros <= most_micros_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(call, ": a step of ", micros, " micro-batches, but run '", run_id_,
                                                 "' was created for at most ", most_micros_,
                                                 " (RunSpec.accumulation)"));
}

absl::Status StepLimits::CheckBegin(const StepValues& values) const {
  const auto inverse = static_cast<float>(1 / values.loss_scale);
  if (!(values.loss_scale > 0) || !std::isfinite(inverse) || inverse == 0) {
    return absl::InvalidArgumentError(absl::StrCat("BeginStep: loss_scale is ", values.loss_scale,
                                                   ", wanted a number above 0 whose inverse is a float"));
  }
  if (auto s = CheckMicros("BeginStep", values.micro_batches); !s.ok()) return s;
  return CheckGroups("BeginStep", values.groups);
}

absl::Status StepLimits::CheckNorm(const std::optional<double>& max_grad_norm) const {
  if (!max_grad_norm) return absl::OkStatus();
  if (!(*max_grad_norm > 0 && std::isfinite(*max_grad_norm))) {
    return absl::InvalidArgumentError(absl::StrCat("EndStep: max_grad_norm is ", *max_grad_norm,
                                                   ", wanted a finite number above 0; leave it unset for the run's"));
  }
  if (!clips_tensors_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("EndStep: max_grad_norm is given, but run '", run_id_,
                   "' has tensor_clip, which clips each tensor by its own norm; leave it unset"));
}

absl::Status StepLimits::CheckEnd(const StepEndValues& values) const {
  if (values.client_state.size() > kMostClientStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat("EndStep: client_state has ", values.client_state.size(),
                                                   " bytes, at most ", kMostClientStateBytes,
                                                   " are kept; leave out what can be made again"));
  }
  if (auto s = CheckNorm(values.max_grad_norm); !s.ok()) return s;
  if (auto s = CheckShare("gradient_flushed", values.gradient_flushed); !s.ok()) return s;
  if (auto s = CheckShare("gradient_overflowed", values.gradient_overflowed); !s.ok()) return s;
  if (auto s = CheckGroups("EndStep", values.groups); !s.ok()) return s;
  if (staged_ || std::none_of(values.groups.begin(), values.groups.end(), GivesValues)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("EndStep with values of groups needs a run whose commit is staged, but run '", run_id_,
                   "' has commit = release, and updates tensors before the step is whole: give them to BeginStep"));
}

}  // namespace ballast
