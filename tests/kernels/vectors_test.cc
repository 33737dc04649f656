// tests/oracle/vectors.json: every record is asserted, against the kernels where they have what it speaks of, and
// against the oracle's formulas where they have not.
#include "tests/kernels/records.h"

namespace ballast::kernels {
namespace {

TEST(VectorsTest, EveryRecordHolds) {
  Checks all;
  for (Checks part : {MasterChecks(), StateChecks(), DynamicChecks(), RuleChecks(), FormulaChecks()}) all.merge(part);
  size_t seen = 0;
  for (const YAML::Node& record : YAML::LoadFile(BALLAST_VECTORS)) {
    const std::string id = record["id"].as<std::string>();
    SCOPED_TRACE(id);
    ++seen;
    const auto check = all.find(id);
    ASSERT_NE(check, all.end()) << "a record that nothing asserts";
    check->second(record);
  }
  EXPECT_EQ(seen, 36u);
  EXPECT_EQ(seen, all.size());
}

}  // namespace
}  // namespace ballast::kernels
