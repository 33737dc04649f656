#include "tests/chaos/chaos.h"

#include <gtest/gtest.h>

#include <ostream>

namespace ballast {
namespace {

struct Row {
  const char* name;
  bool staged, forgetful;
};
void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

class ChaosTest : public ::testing::TestWithParam<Row> {};

TEST_P(ChaosTest, AHundredCutsChangeNoBit) {
  const ChaosReport report =
      RunChaos({.seed = 1, .staged = GetParam().staged, .forgetful = GetParam().forgetful, .steps = 50, .cuts = 100});
  EXPECT_EQ(report.failure, "");
  EXPECT_GT(report.late, report.cuts / 4);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ChaosTest,
                         ::testing::Values(Row{"Release", false, false}, Row{"ReleaseForgetful", false, true},
                                           Row{"Staged", true, false}, Row{"StagedForgetful", true, true}),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace ballast
