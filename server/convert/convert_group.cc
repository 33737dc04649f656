// A group's rule, formats and hyperparameters: of the spec, and of a step.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/spec/kernel_choice.h"

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

// As many digits as tell two doubles apart.
void AddLine(absl::string_view name, double value, std::string* content) {
  absl::StrAppendFormat(content, "%s = %.17g\n", name, value);
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

// The values that a step gives for one group, by their place in the kernel. Each adds a line to `content`.
absl::StatusOr<std::vector<message::GroupValue>> ToValues(const v1::GroupStep& g, uint32_t group, const RunSpec& spec,
                                                          const std::string& at, std::string* content) {
  const kernels::Kernel& kernel = *spec.groups[group].kernel;
  const struct {
    absl::string_view name;
    bool given;
    double value;
  } values[] = {{"lr", g.has_lr(), g.lr()},
                {"weight_decay", g.has_weight_decay(), g.weight_decay()},
                {"beta1", g.has_beta1(), g.beta1()},
                {"beta2", g.has_beta2(), g.beta2()},
                {"momentum", g.has_momentum(), g.momentum()}};
  std::vector<message::GroupValue> made;
  for (const auto& v : values) {
    if (!v.given) continue;
    const std::string field = StrCat("groups[", group, "].", v.name);
    const auto h = FindHyper(kernel, v.name);
    if (!h) {
      return InvalidArgumentError(
          StrCat(at, field, " is given, but rule ", kernel.rule, " has only ", ListNames(kernel.hypers)));
    }
    RETURN_IF_ERROR(CheckHyper(kernel.hypers[*h], v.value, at + field));
    made.push_back({.group = group, .hyper = static_cast<uint32_t>(*h), .value = v.value});
    AddLine(field, v.value, content);
  }
  return made;
}

absl::StatusOr<std::vector<message::GroupValue>> ToValues(
    const google::protobuf::RepeatedPtrField<v1::GroupStep>& groups, const RunSpec& spec, const std::string& message,
    std::string* content) {
  if (static_cast<size_t>(groups.size()) > spec.groups.size()) {
    return InvalidArgumentError(
        StrCat(message, " has values of ", groups.size(), " groups, but the run has ", spec.groups.size()));
  }
  std::vector<message::GroupValue> all;
  for (int i = 0; i < groups.size(); ++i) {
    ASSIGN_OR_RETURN(const auto values, ToValues(groups[i], static_cast<uint32_t>(i), spec, message + ", ", content));
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
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
  made.master = kernels::FindMasterFormat(made.kernel->master);
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
  if (begin.has_loss_scale()) made.loss_scale = begin.loss_scale();
  const float inverse = static_cast<float>(1 / made.loss_scale);
  if (!(made.loss_scale > 0) || !std::isfinite(inverse) || inverse == 0) {
    return InvalidArgumentError(StrCat("StepBegin of step ", begin.step(), ", loss_scale is ", made.loss_scale,
                                       "; wanted: a positive number whose inverse is a float; leave it unset for 1"));
  }
  AddLine("loss_scale", made.loss_scale, &made.content);
  made.hyper = HyperOfSpec(spec);
  ASSIGN_OR_RETURN(const auto values,
                   ToValues(begin.groups(), spec, StrCat("StepBegin of step ", begin.step()), &made.content));
  for (const message::GroupValue& v : values) made.hyper[v.group][v.hyper] = v.value;
  return made;
}

namespace {

// What the whole run's step measures, which a part's verdict is of.
absl::Status TakeWhole(const v1::StepEnd& end, const RunSpec& spec, message::StepEnd* made) {
  const bool wanted = spec.part && spec.staged && !end.discard();
  if (end.has_whole() != wanted) {
    return InvalidArgumentError(StrCat(
        "StepEnd ", wanted ? "without" : "with", " `whole`, what the gradients of all parts of a run measure; wanted: ",
        "with it in the staged steps of a part, unless they are discarded, and else without"));
  }
  made->checkpoint = end.checkpoint();
  made->kept_step = end.kept_step();
  if (!wanted) return absl::OkStatus();
  const v1::WholeMeasure& whole = end.whole();
  if (std::isnan(whole.grad_norm()) || whole.grad_norm() < 0) {
    return InvalidArgumentError(StrCat("StepEnd.whole.grad_norm is ", whole.grad_norm(), "; wanted: at least 0"));
  }
  made->whole = {.norm = whole.grad_norm(),
                 .nonfinite_tensors = whole.nonfinite_tensors(),
                 .first_nonfinite = whole.first_nonfinite(),
                 .first_name = whole.first_name()};
  AddLine("whole.grad_norm", whole.grad_norm(), &made->content);
  AddLine("whole.nonfinite_tensors", static_cast<double>(whole.nonfinite_tensors()), &made->content);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<message::StepEnd> ToStepEnd(v1::StepEnd* end, const RunSpec& spec) {
  if (end->client_state().size() > kMostClientState) {
    return InvalidArgumentError(StrCat("StepEnd.client_state has ", end->client_state().size(),
                                       " bytes; wanted: at most ", kMostClientState,
                                       "; keep large state in a file, and its name here"));
  }
  message::StepEnd made{.client_state = std::move(*end->mutable_client_state())};
  ASSIGN_OR_RETURN(made.values, ToValues(end->groups(), spec, "StepEnd", &made.content));
  made.discard = end->discard();
  if (end->has_loss()) made.loss = end->loss();
  const auto share = [](absl::string_view field, double value) -> absl::Status {
    if (value >= 0 && value <= 1) return absl::OkStatus();
    return InvalidArgumentError(StrCat("StepEnd.", field, " is ", value, "; wanted: a share, from 0 to 1"));
  };
  if (end->has_gradient_flushed()) {
    made.gradient_flushed = end->gradient_flushed();
    RETURN_IF_ERROR(share("gradient_flushed", *made.gradient_flushed));
  }
  if (end->has_gradient_overflowed()) {
    made.gradient_overflowed = end->gradient_overflowed();
    RETURN_IF_ERROR(share("gradient_overflowed", *made.gradient_overflowed));
  }
  RETURN_IF_ERROR(TakeWhole(*end, spec, &made));
  if (!end->has_max_grad_norm()) return made;
  const double norm = end->max_grad_norm();
  if (!(std::isfinite(norm) && norm > 0)) {
    return InvalidArgumentError(StrCat("StepEnd.max_grad_norm is ", norm,
                                       "; wanted: a finite number above 0; leave it unset for the run's clipping"));
  }
  if (spec.tensor_clip) {
    return InvalidArgumentError(
        "StepEnd.max_grad_norm is given, but the run has tensor_clip, which clips each tensor by its own norm: leave "
        "it "
        "unset, or create the run without tensor_clip");
  }
  made.max_grad_norm = norm;
  AddLine("max_grad_norm", norm, &made.content);
  return made;
}

}  // namespace ballast
