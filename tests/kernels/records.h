// Reading tests/oracle/vectors.json.
#pragma once

#include <gtest/gtest.h>
#include <yaml-cpp/yaml.h>

#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ballast::kernels {

// Records by id, each with what must hold of it.
using Checks = std::map<std::string, std::function<void(const YAML::Node&)>>;
Checks MasterChecks();   // vectors_masters.cc
Checks StateChecks();    // vectors_states.cc
Checks DynamicChecks();  // vectors_dynamics.cc
Checks RuleChecks();     // vectors_rules.cc
Checks FormulaChecks();  // vectors_formulas.cc

inline double Number(const YAML::Node& node) {
  const std::string text = node.as<std::string>();
  if (text == "inf") return INFINITY;
  if (text == "nan") return NAN;
  return node.as<double>();
}
inline std::vector<float> Floats(const YAML::Node& list) {
  std::vector<float> values;
  for (const YAML::Node& x : list) values.push_back(static_cast<float>(Number(x)));
  return values;
}
inline std::vector<int> Integers(const YAML::Node& list) { return list.as<std::vector<int>>(); }
inline float Pattern(const YAML::Node& hex) {
  return std::bit_cast<float>(static_cast<uint32_t>(std::stoul(hex.as<std::string>(), nullptr, 16)));
}
inline void ExpectWithin(double got, const YAML::Node& wanted, double relative) {
  EXPECT_NEAR(got, Number(wanted), std::abs(Number(wanted)) * relative);
}

}  // namespace ballast::kernels
