#include "client/cpp/wire/format_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::RunSpec Spec() {
  v1::RunSpec spec;
  for (const char* rule : {"adamw", "lion"}) {
    v1::GroupSpec* group = spec.add_groups();
    group->set_rule(rule);
    group->set_serving("bf16");
  }
  const auto add = [&](const char* name, uint32_t group) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(name);
    tensor->set_group(group);
  };
  add("embed.weight", 0);
  add("0.norm.weight", 0);
  add("0.weight", 1);
  add("1.norm.weight", 1);
  return spec;
}

std::vector<uint32_t> GroupsOf(const v1::RunSpec& spec) {
  std::vector<uint32_t> groups;
  for (const v1::TensorSpec& tensor : spec.tensors()) groups.push_back(tensor.group());
  return groups;
}

TEST(FormatRulesTest, TheFirstMatchSplitsItsGroup) {
  v1::RunSpec spec = Spec();
  const FormatRule rules[] = {{.pattern = "*norm*", .master = "split32"},
                              {.pattern = "0.*", .state = "fp32", .serving = "int8-row"}};
  const auto origin = ApplyFormatRules(rules, &spec);
  ASSERT_TRUE(origin.ok()) << origin.status();
  EXPECT_THAT(*origin, ElementsAre(0, 1, 0, 1, 1));
  EXPECT_THAT(GroupsOf(spec), ElementsAre(0, 2, 3, 4));
  EXPECT_EQ(spec.groups(2).master(), "split32");
  EXPECT_EQ(spec.groups(2).rule(), "adamw");
  EXPECT_EQ(spec.groups(2).serving(), "bf16");
  EXPECT_EQ(spec.groups(3).rule(), "lion");
  EXPECT_EQ(spec.groups(3).state(), "fp32");
  EXPECT_EQ(spec.groups(3).serving(), "int8-row");
  EXPECT_EQ(spec.groups(4).rule(), "lion");
}

TEST(FormatRulesTest, APatternThatMatchesNothingIsNamed) {
  v1::RunSpec spec = Spec();
  const FormatRule rules[] = {{.pattern = "*", .master = "fp32"}, {.pattern = "head*", .master = "fp32"}};
  EXPECT_THAT(std::string(ApplyFormatRules(rules, &spec).status().message()), HasSubstr("'head*' matches no tensor"));
  EXPECT_EQ(spec.groups_size(), 2);
}

TEST(FormatRulesTest, WithoutRulesNothingChanges) {
  v1::RunSpec spec = Spec();
  EXPECT_THAT(*ApplyFormatRules({}, &spec), ElementsAre(0, 1));
  EXPECT_EQ(spec.SerializeAsString(), Spec().SerializeAsString());
}

}  // namespace
}  // namespace ballast
