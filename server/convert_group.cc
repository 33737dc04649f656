// A group's rule, formats and hyperparameters: of the spec, and of a step.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/convert.h"
#include "server/kernel_choice.h"
#include "server/status_macros.h"
#include "server/step_values.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

constexpr absl::string_view kLrPeak = "lr_peak";

std::string ListNames(std::span<const kernels::Hyper> hypers) {
  return absl::StrJoin(hypers, ", ", [](std::string* out, const auto& h) { absl::StrAppend(out, h.name); });
}

// The place of the rule's hyperparameter of this name, or none.
std::optional<size_t> FindHyper(const kernels::Kernel& kernel, absl::string_view name) {
  for (size_t h = 0; h < kernel.hypers.size(); ++h) {
    if (kernel.hypers[h].name == name) return h;
  }
  return std::nullopt;
}

absl::Status CheckHyper(const kernels::Hyper& h, double value, const std::string& at) {
  const bool low = h.open_min ? value > h.min : value >= h.min;
  const bool high = h.open_max ? value < h.max : value <= h.max;
  if (low && high) return absl::OkStatus();  // a NaN is neither
  return InvalidArgumentError(StrCat(at, " is ", value, "; wanted: ", h.open_min ? "above " : "at least ", h.min, ", ",
                                     h.open_max ? "below " : "at most ", h.max));
}

absl::Status TakeLrPeak(const v1::GroupSpec& group, const kernels::Kernel& kernel, const std::string& at,
                        std::vector<double>* values) {
  if (!group.has_lr_peak()) return absl::OkStatus();
  const auto h = FindHyper(kernel, kLrPeak);
  if (!h) {
    return InvalidArgumentError(StrCat(at, ".lr_peak is given, but rule ", kernel.rule,
                                       " does not decouple its decay from lr; leave it unset"));
  }
  if (group.hyper().contains(std::string(kLrPeak))) {
    return InvalidArgumentError(StrCat(at, ".lr_peak is there twice: in hyper too; give one of them"));
  }
  if (!(group.lr_peak() > 0)) {
    return InvalidArgumentError(StrCat(at, ".lr_peak is ", group.lr_peak(), "; wanted: above 0, or leave it unset"));
  }
  (*values)[*h] = group.lr_peak();
  return CheckHyper(kernel.hypers[*h], group.lr_peak(), at + ".lr_peak");
}

absl::StatusOr<std::vector<double>> ToHyper(const v1::GroupSpec& group, const kernels::Kernel& kernel,
                                            const std::string& at) {
  for (const auto& [name, _] : group.hyper()) {
    if (FindHyper(kernel, name)) continue;
    return InvalidArgumentError(
        StrCat(at, ".hyper has '", name, "', which rule ", kernel.rule, " lacks; valid: ", ListNames(kernel.hypers)));
  }
  std::vector<double> values;
  for (const kernels::Hyper& h : kernel.hypers) {
    const auto given = group.hyper().find(h.name);
    values.push_back(given == group.hyper().end() ? h.value : given->second);
    RETURN_IF_ERROR(CheckHyper(h, values.back(), StrCat(at, ".hyper['", h.name, "']")));
  }
  RETURN_IF_ERROR(TakeLrPeak(group, kernel, at, &values));
  return values;
}

// A step's values of one group, those that were given.
absl::Status TakeValues(const v1::GroupStep& g, const kernels::Kernel& kernel, const std::string& at,
                        std::vector<double>* hyper) {
  const struct {
    absl::string_view name;
    bool given;
    double value;
  } values[] = {{"lr", g.has_lr(), g.lr()},
                {"weight_decay", g.has_weight_decay(), g.weight_decay()},
                {"beta1", g.has_beta1(), g.beta1()},
                {"beta2", g.has_beta2(), g.beta2()},
                {"momentum", g.has_momentum(), g.momentum()}};
  for (const auto& v : values) {
    if (!v.given) continue;
    const auto h = FindHyper(kernel, v.name);
    if (!h) {
      return InvalidArgumentError(
          StrCat(at, v.name, " is given, but rule ", kernel.rule, " has only ", ListNames(kernel.hypers)));
    }
    RETURN_IF_ERROR(CheckHyper(kernel.hypers[*h], v.value, StrCat(at, v.name)));
    (*hyper)[*h] = v.value;
  }
  return absl::OkStatus();
}

}  // namespace

std::string ListWireFormats(bool kernels::WireFormat::*fit) {
  std::string names;
  for (const kernels::WireFormat& format : kernels::WireFormats()) {
    if (format.*fit) absl::StrAppend(&names, names.empty() ? "" : ", ", format.name);
  }
  return names;
}

absl::StatusOr<kernels::WireIndex> ToWireFormat(const std::string& name, bool kernels::WireFormat::*fit,
                                                const std::string& at) {
  const kernels::WireIndex format = kernels::FindWireFormat(name);
  if (format >= 0 && kernels::WireFormats()[static_cast<size_t>(format)].*fit) return format;
  return InvalidArgumentError(StrCat(at, " is '", name, "'; valid: ", ListWireFormats(fit)));
}

absl::StatusOr<GroupSpec> ToGroupSpec(const v1::GroupSpec& group, const std::string& at) {
  GroupSpec made;
  ASSIGN_OR_RETURN(made.kernel, ChooseKernel(group.rule(), group.master(), group.state(), at));
  made.master = kernels::FindMaster(made.kernel->master);
  ASSIGN_OR_RETURN(made.hyper, ToHyper(group, *made.kernel, at));
  if (!group.rounding().empty() && group.rounding() != "stochastic" && group.rounding() != "nearest") {
    return InvalidArgumentError(StrCat(at, ".rounding is '", group.rounding(), "'; valid: stochastic, nearest"));
  }
  made.stochastic = group.rounding() != "nearest";
  if (!group.serving().empty()) {
    RETURN_IF_ERROR(ToWireFormat(group.serving(), &kernels::WireFormat::serving, at + ".serving").status());
  }
  if (!group.gradient().empty()) {
    RETURN_IF_ERROR(ToWireFormat(group.gradient(), &kernels::WireFormat::gradient, at + ".gradient").status());
  }
  return made;
}

absl::StatusOr<message::StepBegin> ToStepBegin(const v1::StepBegin& begin, const RunSpec& spec) {
  message::StepBegin made{.step = begin.step()};
  if (begin.loss_scale() != 0) made.loss_scale = begin.loss_scale();
  const float inverse = static_cast<float>(1 / made.loss_scale);
  if (!(made.loss_scale > 0) || !std::isfinite(inverse) || inverse == 0) {
    return InvalidArgumentError(StrCat("loss_scale is ", begin.loss_scale(),
                                       "; wanted: a positive number whose inverse is a float, or 0 for 1"));
  }
  if (static_cast<size_t>(begin.groups_size()) > spec.groups.size()) {
    return InvalidArgumentError(
        StrCat("StepBegin has values of ", begin.groups_size(), " groups, but the run has ", spec.groups.size()));
  }
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    std::vector<double>& hyper = made.hyper.emplace_back(spec.groups[i].hyper);
    if (i >= static_cast<size_t>(begin.groups_size())) continue;
    RETURN_IF_ERROR(TakeValues(begin.groups(static_cast<int>(i)), *spec.groups[i].kernel,
                               StrCat("StepBegin of step ", begin.step(), ", groups[", i, "]."), &hyper));
  }
  made.content = StepContent(made.loss_scale, made.hyper);
  return made;
}

}  // namespace ballast
