// Storage formats chosen by the tensors' names.
//
//   const FormatRule rules[] = {{.pattern = "*embed*", .master = "fp32", .state = "fp32"}, {.pattern = "*norm*", ...}};
//   auto origin = ApplyFormatRules(rules, &spec);
//
// Pure; thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "ballast/v1/run.pb.h"

namespace ballast {

// The formats of tensors whose name matches the pattern (*, ?, [a-z]; * also matches dots). An empty format stays that
// of the group.
struct FormatRule {
  std::string pattern;
  std::string master = {}, state = {}, rounding = {}, serving = {}, gradient = {};
};

// Gives each tensor the formats of the first rule that matches its name, and splits groups accordingly: existing groups
// keep their index; new ones, equal in everything else, come after them. Returns, by index, the group that each group
// was split from: a step's values for that group apply to the new one, too. INVALID_ARGUMENT, with nothing changed,
// names a pattern that matches no tensor.
absl::StatusOr<std::vector<uint32_t>> ApplyFormatRules(absl::Span<const FormatRule> rules, v1::RunSpec* spec);

}  // namespace ballast
