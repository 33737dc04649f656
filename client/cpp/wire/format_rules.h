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

// For tensors whose name matches the pattern (*, ?, [a-z]; * goes over dots). What is empty stays the group's.
struct FormatRule {
  std::string pattern;
  std::string master = {}, state = {}, rounding = {}, serving = {}, gradient = {};
};

// Gives each tensor the formats of the first rule that matches its name. Groups are split accordingly: those there keep
// their index, new ones, with all else the same, come after them. Returns the group that each one was split from, by
// index: a step's values of that group are those of the new one. INVALID_ARGUMENT, with nothing changed, names a
// pattern that matches no tensor.
absl::StatusOr<std::vector<uint32_t>> ApplyFormatRules(absl::Span<const FormatRule> rules, v1::RunSpec* spec);

}  // namespace ballast
