// RunSpec: from the wire's to the daemon's.
#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/checksum.h"

#include "server/convert.h"
#include "server/status_macros.h"
#include "server/utf8.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

// 2^40 elements are 4 TiB of fp32: past any machine this runs on, and far from overflow in sums of bytes.
constexpr int64_t kMostElements = int64_t{1} << 40;
constexpr int kMostDimensions = 32;
constexpr int kMostGroups = 1024;

std::string NotOneOf(absl::string_view field, absl::string_view got, const std::string& names) {
  return StrCat(field, " is '", got, "'; valid: ", names);
}

template <typename Items>
std::string ListNames(const Items& items) {
  return absl::StrJoin(items, ", ", [](std::string* out, const auto& item) { absl::StrAppend(out, item.name); });
}

absl::Status NotInThisVersion(absl::string_view field, absl::string_view got, absl::string_view mend) {
  return InvalidArgumentError(StrCat(field, " = ", got, " is not in this version; ", mend));
}

bool ValidRunId(const std::string& id) {
  const auto alphanumeric = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  return !id.empty() && id.size() <= 63 && alphanumeric(id.front()) && alphanumeric(id.back()) &&
         std::all_of(id.begin(), id.end(), [&](char c) { return alphanumeric(c) || c == '-'; });
}

absl::Status CheckPolicies(const v1::RunSpec& spec) {
  if (spec.commit() == v1::COMMIT_MODE_STAGED) {
    return NotInThisVersion("commit", "staged", "use release");
  }
  if (spec.accumulation() > 1) {
    return NotInThisVersion("accumulation", StrCat(spec.accumulation()),
                            "sum micro-batches in the trainer and set accumulation to 1");
  }
  if (spec.has_max_grad_norm()) {
    return NotInThisVersion("max_grad_norm", StrCat(spec.max_grad_norm()), "leave it unset");
  }
  if (spec.nonfinite() > v1::NONFINITE_POLICY_SKIP_TENSOR) {
    return NotInThisVersion("nonfinite", v1::NonfinitePolicy_Name(spec.nonfinite()),
                            "use NONFINITE_POLICY_SKIP_TENSOR");
  }
  if (spec.on_torn() > v1::TORN_POLICY_CLOSE) {
    return NotInThisVersion("on_torn", v1::TornPolicy_Name(spec.on_torn()), "use TORN_POLICY_CLOSE");
  }
  const bool unknown = spec.commit() < 0 || spec.commit() > v1::COMMIT_MODE_STAGED || spec.reduction() < 0 ||
                       spec.reduction() > v1::REDUCTION_SUM || spec.nonfinite() < 0 || spec.on_torn() < 0;
  if (unknown) return InvalidArgumentError("commit, reduction, nonfinite or on_torn has a value this version lacks");
  if (!(spec.rank_timeout_s() >= 0 && spec.rank_timeout_s() <= 1e6)) {
    return InvalidArgumentError(
        StrCat("rank_timeout_s is ", spec.rank_timeout_s(), "; wanted: 0 (the default, 60) to 1000000 seconds"));
  }
  return absl::OkStatus();
}

std::string ListTriples() {
  return absl::StrJoin(kernels::Kernels(), ", ", [](std::string* out, const kernels::Kernel& k) {
    absl::StrAppend(out, k.rule, "/", k.master, "/", k.state);
  });
}

absl::StatusOr<const kernels::Kernel*> ToKernel(const v1::GroupSpec& group, const std::string& at) {
  const std::string master = group.master().empty() ? "split24" : group.master();
  const std::string state = group.state().empty() ? "companded8" : group.state();
  const auto rules = kernels::RuleNames();
  const auto states = kernels::StateNames();
  if (std::find(rules.begin(), rules.end(), group.rule()) == rules.end()) {
    return InvalidArgumentError(NotOneOf(at + ".rule", group.rule(), absl::StrJoin(rules, ", ")));
  }
  if (kernels::FindMaster(master) == nullptr) {
    return InvalidArgumentError(NotOneOf(at + ".master", master, ListNames(kernels::Masters())));
  }
  if (std::find(states.begin(), states.end(), state) == states.end()) {
    return InvalidArgumentError(NotOneOf(at + ".state", state, absl::StrJoin(states, ", ")));
  }
  const kernels::Kernel* kernel = kernels::FindKernel(group.rule(), master, state);
  if (kernel != nullptr) return kernel;
  return InvalidArgumentError(StrCat(at, " asks for rule/master/state ", group.rule(), "/", master, "/", state,
                                     ", which is not among those built: ", ListTriples()));
}

absl::Status CheckHyper(const kernels::Hyper& h, double value, const std::string& at) {
  const bool low = h.open_min ? value > h.min : value >= h.min;
  const bool high = h.open_max ? value < h.max : value <= h.max;
  if (low && high) return absl::OkStatus();  // a NaN is neither
  return InvalidArgumentError(StrCat(at, " is ", value, "; wanted: ", h.open_min ? "above " : "at least ", h.min, ", ",
                                     h.open_max ? "below " : "at most ", h.max));
}

absl::StatusOr<std::vector<double>> ToHyper(const v1::GroupSpec& group, const kernels::Kernel& kernel,
                                            const std::string& at) {
  for (const auto& [name, _] : group.hyper()) {
    const auto known = [&, n = name](const kernels::Hyper& h) { return n == h.name; };
    if (std::none_of(kernel.hypers.begin(), kernel.hypers.end(), known)) {
      return InvalidArgumentError(
          StrCat(at, ".hyper has '", name, "', which rule ", kernel.rule, " lacks; valid: ", ListNames(kernel.hypers)));
    }
  }
  std::vector<double> values;
  for (const kernels::Hyper& h : kernel.hypers) {
    const auto given = group.hyper().find(h.name);
    values.push_back(given == group.hyper().end() ? h.value : given->second);
    RETURN_IF_ERROR(CheckHyper(h, values.back(), StrCat(at, ".hyper['", h.name, "']")));
  }
  return values;
}

absl::StatusOr<GroupSpec> ToGroup(const v1::GroupSpec& group, const std::string& at) {
  GroupSpec made;
  ASSIGN_OR_RETURN(made.kernel, ToKernel(group, at));
  made.master = kernels::FindMaster(made.kernel->master);
  ASSIGN_OR_RETURN(made.hyper, ToHyper(group, *made.kernel, at));
  if (!group.rounding().empty() && group.rounding() != "stochastic" && group.rounding() != "nearest") {
    return InvalidArgumentError(NotOneOf(at + ".rounding", group.rounding(), "stochastic, nearest"));
  }
  made.stochastic = group.rounding() != "nearest";
  if (!group.serving().empty() && kernels::FindWireFormat(group.serving()) < 0) {
    return InvalidArgumentError(NotOneOf(at + ".serving", group.serving(), ListWireFormats()));
  }
  if (group.has_lr_peak()) {
    return NotInThisVersion(at + ".lr_peak (decouple_lr)", StrCat(group.lr_peak()), "leave it unset");
  }
  return made;
}

absl::StatusOr<uint64_t> CountElements(const v1::TensorSpec& t, const std::string& at) {
  if (t.shape_size() > kMostDimensions) {
    return InvalidArgumentError(
        StrCat(at, ".shape has ", t.shape_size(), " dimensions; wanted: at most ", kMostDimensions));
  }
  int64_t elements = 1;
  for (const int64_t size : t.shape()) {
    if (size < 0) return InvalidArgumentError(StrCat(at, ".shape has the size ", size, "; wanted: at least 1"));
    if (size == 0) {
      return InvalidArgumentError(StrCat(at, ".shape has the size 0: there is nothing to train; leave the tensor out"));
    }
    if (size > kMostElements / elements) {
      return InvalidArgumentError(StrCat(at, ".shape [", absl::StrJoin(t.shape(), ", "), "] has more than ",
                                         kMostElements, " elements; split the tensor"));
    }
    elements *= size;
  }
  return static_cast<uint64_t>(elements);
}

absl::Status CheckName(const v1::TensorSpec& t, const std::string& at, const Config::Limits& limits) {
  if (t.name().empty()) return InvalidArgumentError(StrCat(at, ".name is empty; every tensor needs a name of its own"));
  if (t.name().size() > limits.name_bytes) {
    return InvalidArgumentError(StrCat(at, ".name '", ValidUtf8(t.name(), 64), "...' has ", t.name().size(),
                                       " bytes; wanted: at most ", limits.name_bytes, " (limits.name_bytes)"));
  }
  if (ValidUtf8(t.name()) != t.name()) {
    return InvalidArgumentError(StrCat(at, ".name '", ValidUtf8(t.name(), 64), "' is not valid UTF-8"));
  }
  return absl::OkStatus();
}

absl::Status CheckScale(const std::string& at, double scale) {
  if (std::isfinite(scale) && scale >= 0) return absl::OkStatus();
  return InvalidArgumentError(StrCat(at, " is ", scale, "; wanted: a finite number, at least 0"));
}

absl::StatusOr<TensorSpec> ToTensor(const v1::TensorSpec& t, const v1::RunSpec& spec, const std::string& at) {
  TensorSpec made{.name = t.name(), .group = t.group()};
  ASSIGN_OR_RETURN(made.elements, CountElements(t, at));
  made.gradient_format = kernels::FindWireFormat(t.dtype());
  if (made.gradient_format < 0) {
    return InvalidArgumentError(NotOneOf(at + ".dtype", t.dtype(), ListWireFormats()));
  }
  if (t.group() >= static_cast<uint32_t>(spec.groups_size())) {
    return InvalidArgumentError(StrCat(at, ".group is ", t.group(), ", but there are ", spec.groups_size(), " groups"));
  }
  const std::string& serving = spec.groups(static_cast<int>(t.group())).serving();
  made.serving_format = serving.empty() ? made.gradient_format : kernels::FindWireFormat(serving);
  if (t.has_lr_scale()) made.lr_scale = t.lr_scale();
  if (t.has_wd_scale()) made.wd_scale = t.wd_scale();
  RETURN_IF_ERROR(CheckScale(at + ".lr_scale", made.lr_scale));
  RETURN_IF_ERROR(CheckScale(at + ".wd_scale", made.wd_scale));
  made.key = NameKey(made.name, spec.seed());
  return made;
}

absl::Status CheckCounts(const v1::RunSpec& spec, const Config::Limits& limits) {
  if (!ValidRunId(spec.run_id())) {
    return InvalidArgumentError(StrCat("run_id is '", ValidUtf8(spec.run_id(), 80),
                                       "'; wanted: 1 to 63 of a-z, 0-9 and -, neither first nor last a -"));
  }
  if (spec.tensors_size() == 0) return InvalidArgumentError("tensors is empty; a run trains at least one tensor");
  if (static_cast<uint32_t>(spec.tensors_size()) > limits.tensors) {
    return InvalidArgumentError(
        StrCat("tensors has ", spec.tensors_size(), " entries; wanted: at most ", limits.tensors, " (limits.tensors)"));
  }
  if (spec.groups_size() == 0) return InvalidArgumentError("groups is empty; name at least one group with its rule");
  if (spec.groups_size() > kMostGroups) {
    return InvalidArgumentError(StrCat("groups has ", spec.groups_size(), " entries; wanted: at most ", kMostGroups));
  }
  return absl::OkStatus();
}

// A chunk of the widest format must fit a message with room for its header.
uint64_t ChunkElements(const Config::Limits& limits) {
  constexpr uint64_t kHeader = 1024, kWidest = 4;
  const uint64_t message = limits.message_bytes > kHeader ? limits.message_bytes - kHeader : 0;
  const uint64_t tiles = std::min(limits.chunk_bytes, message) / kWidest / kernels::kTile;
  return std::max<uint64_t>(tiles, 1) * kernels::kTile;
}

}  // namespace

std::string ListWireFormats() { return ListNames(kernels::WireFormats()); }

absl::StatusOr<RunSpec> ToRunSpec(const v1::RunSpec& spec, const Config::Limits& limits) {
  RETURN_IF_ERROR(CheckCounts(spec, limits));
  RETURN_IF_ERROR(CheckPolicies(spec));
  RunSpec made{.run_id = spec.run_id(), .seed = spec.seed()};
  if (spec.stats_every() != 0) made.stats_every = spec.stats_every();
  if (spec.rank_timeout_s() != 0) made.rank_timeout_s = spec.rank_timeout_s();
  made.chunk_elements = ChunkElements(limits);
  made.credit_bytes = limits.credit_bytes;
  made.lease_s = limits.lease_s;
  made.layer_groups = limits.layer_groups;
  for (int i = 0; i < spec.groups_size(); ++i) {
    ASSIGN_OR_RETURN(GroupSpec group, ToGroup(spec.groups(i), StrCat("groups[", i, "]")));
    made.groups.push_back(std::move(group));
  }
  std::unordered_set<std::string> names;
  for (int i = 0; i < spec.tensors_size(); ++i) {
    const v1::TensorSpec& t = spec.tensors(i);
    RETURN_IF_ERROR(CheckName(t, StrCat("tensors[", i, "]"), limits));
    if (!names.insert(t.name()).second) {
      return InvalidArgumentError(
          StrCat("tensors[", i, "].name '", t.name(), "' is there twice; every tensor needs a name of its own"));
    }
    ASSIGN_OR_RETURN(TensorSpec tensor, ToTensor(t, spec, StrCat("tensors[", i, "] '", t.name(), "'")));
    made.tensors.push_back(std::move(tensor));
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
    const v1::GroupStep& g = begin.groups(static_cast<int>(i));
    const struct {
      absl::string_view name;
      bool given;
      double value;
    } values[] = {{"lr", g.has_lr(), g.lr()},
                  {"weight_decay", g.has_weight_decay(), g.weight_decay()},
                  {"beta1", g.has_beta1(), g.beta1()},
                  {"beta2", g.has_beta2(), g.beta2()},
                  {"momentum", g.has_momentum(), g.momentum()}};
    const kernels::Kernel& kernel = *spec.groups[i].kernel;
    for (const auto& v : values) {
      if (!v.given) continue;
      const auto h = std::find_if(kernel.hypers.begin(), kernel.hypers.end(),
                                  [&](const kernels::Hyper& one) { return v.name == one.name; });
      const std::string at = StrCat("StepBegin of step ", begin.step(), ", groups[", i, "].", v.name);
      if (h == kernel.hypers.end()) {
        return InvalidArgumentError(
            StrCat(at, " is given, but rule ", kernel.rule, " has only ", ListNames(kernel.hypers)));
      }
      RETURN_IF_ERROR(CheckHyper(*h, v.value, at));
      hyper[static_cast<size_t>(h - kernel.hypers.begin())] = v.value;
    }
  }
  begin.SerializeToString(&made.content);
  return made;
}

}  // namespace ballast
