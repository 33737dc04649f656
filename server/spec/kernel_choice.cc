#include "server/spec/kernel_choice.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;
using Names = std::vector<absl::string_view>;

constexpr absl::string_view kUsualMaster = "split24", kUsualState = "companded8";

bool Holds(const Names& names, absl::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

template <typename Items>
Names NamesOf(const Items& items) {
  Names names;
  for (const auto& item : items) names.push_back(item.name);
  return names;
}

absl::Status CheckName(absl::string_view field, absl::string_view name, const Names& valid) {
  if (Holds(valid, name)) return absl::OkStatus();
  return InvalidArgumentError(StrCat(field, " is '", name, "'; valid: ", absl::StrJoin(valid, ", ")));
}

// The different names that the matching kernels have in `field`, in the registry's order.
template <typename Matches>
Names Different(const char* kernels::Kernel::*field, Matches matches) {
  Names names;
  for (const kernels::Kernel& k : kernels::Kernels()) {
    if (matches(k) && !Holds(names, k.*field)) names.push_back(k.*field);
  }
  return names;
}

std::string Say(absl::string_view kind, const Names& names) {
  return StrCat(names.size() == 1 ? StrCat("it needs ", kind, " ") : StrCat("it goes with ", kind, "s "),
                absl::StrJoin(names, ", "));
}

absl::Status Refuse(absl::string_view at, absl::string_view rule, absl::string_view master, absl::string_view state) {
  const auto of_rule = [&](const kernels::Kernel& k) { return k.rule == rule; };
  const Names masters = Different(&kernels::Kernel::master, of_rule);
  if (!master.empty() && !Holds(masters, master)) {
    return InvalidArgumentError(
        StrCat(at, ": rule ", rule, " is not built for master ", master, ": ", Say("master", masters)));
  }
  const auto of_both = [&](const kernels::Kernel& k) { return of_rule(k) && (master.empty() || k.master == master); };
  const auto of_state = [&](const kernels::Kernel& k) { return of_rule(k) && k.state == state; };
  const std::string with = master.empty() ? "" : StrCat(" with master ", master);
  const Names elsewhere = Different(&kernels::Kernel::master, of_state);
  return InvalidArgumentError(
      StrCat(at, ": rule ", rule, with, " is not built for state ", state, ": ",
             Say("state", Different(&kernels::Kernel::state, of_both)),
             elsewhere.empty() ? "" : StrCat("; state ", state, " with masters ", absl::StrJoin(elsewhere, ", "))));
}

}  // namespace

absl::StatusOr<const kernels::Kernel*> ChooseKernel(absl::string_view rule, absl::string_view master,
                                                    absl::string_view state, absl::string_view at) {
  const auto rules = kernels::RuleNames();
  RETURN_IF_ERROR(CheckName(StrCat(at, ".rule"), rule, Names(rules.begin(), rules.end())));
  if (!master.empty()) RETURN_IF_ERROR(CheckName(StrCat(at, ".master"), master, NamesOf(kernels::MasterFormats())));
  if (!state.empty()) RETURN_IF_ERROR(CheckName(StrCat(at, ".state"), state, NamesOf(kernels::MomentFormats())));
  const kernels::Kernel* best = nullptr;
  int best_usual = -1;
  for (const kernels::Kernel& k : kernels::Kernels()) {
    if (k.rule != rule || (!master.empty() && k.master != master) || (!state.empty() && k.state != state)) continue;
    const int usual = (k.master == kUsualMaster ? 2 : 0) + (k.state == kUsualState ? 1 : 0);
    if (usual > best_usual) best = &k, best_usual = usual;
  }
  if (best == nullptr) return Refuse(at, rule, master, state);
  return best;
}

}  // namespace ballast
