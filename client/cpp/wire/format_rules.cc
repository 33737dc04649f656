#include "client/cpp/wire/format_rules.h"

#include <fnmatch.h>

#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

bool Matches(const FormatRule& rule, const std::string& name) {
  return fnmatch(rule.pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

// The first rule of the tensor, or rules.size().
size_t FirstMatch(absl::Span<const FormatRule> rules, const std::string& name) {
  size_t r = 0;
  while (r < rules.size() && !Matches(rules[r], name)) ++r;
  return r;
}

absl::Status CheckUsed(absl::Span<const FormatRule> rules, const v1::RunSpec& spec) {
  for (const FormatRule& rule : rules) {
    bool used = false;
    for (const v1::TensorSpec& tensor : spec.tensors()) used |= Matches(rule, tensor.name());
    if (!used) {
      return absl::InvalidArgumentError(absl::StrCat("formats: the pattern '", rule.pattern, "' matches no tensor"));
    }
  }
  return absl::OkStatus();
}

v1::GroupSpec Apply(const FormatRule& rule, v1::GroupSpec group) {
  if (!rule.master.empty()) group.set_master(rule.master);
  if (!rule.state.empty()) group.set_state(rule.state);
  if (!rule.rounding.empty()) group.set_rounding(rule.rounding);
  if (!rule.serving.empty()) group.set_serving(rule.serving);
  if (!rule.gradient.empty()) group.set_gradient(rule.gradient);
  return group;
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> ApplyFormatRules(absl::Span<const FormatRule> rules, v1::RunSpec* spec) {
  if (auto s = CheckUsed(rules, *spec); !s.ok()) return s;
  std::vector<uint32_t> origin(static_cast<size_t>(spec->groups_size()));
  std::iota(origin.begin(), origin.end(), 0);
  std::map<std::pair<uint32_t, size_t>, uint32_t> split;  // from (group, rule) to the new group
  for (v1::TensorSpec& tensor : *spec->mutable_tensors()) {
    const size_t rule = FirstMatch(rules, tensor.name());
    if (rule == rules.size() || tensor.group() >= static_cast<uint32_t>(spec->groups_size())) continue;
    const auto [found, added] = split.try_emplace({tensor.group(), rule}, static_cast<uint32_t>(origin.size()));
    if (added) {
      origin.push_back(tensor.group());
      v1::GroupSpec made = Apply(rules[rule], spec->groups(static_cast<int>(tensor.group())));
      *spec->add_groups() = std::move(made);
    }
    tensor.set_group(found->second);
  }
  return origin;
}

}  // namespace ballast
