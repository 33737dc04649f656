// Step machines that own parts of one run, in many drawn worlds; and planted faults, which the simulator must notice.
#include "tests/server/step/parts_simulator.h"

#include <gtest/gtest.h>

namespace ballast::sim {
namespace {

// Fewer worlds where a sanitizer makes each slow: it is the same machine.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kPartsSeeds = 60, kLeastOfAPartsKind = 1;
#else
constexpr uint64_t kPartsSeeds = 200, kLeastOfAPartsKind = 10;
#endif
constexpr uint64_t kMostPartsSeeds = 3000;  // until a mutant is noticed

TEST(PartsSimulatorTest, PartsHoldTogetherAndEveryKindOfEventOccurs) {
  PartsCounts counts = {};
  for (uint64_t seed = 1; seed <= kPartsSeeds; ++seed) {
    const PartsReport report = SimulateParts({.seed = seed});
    ASSERT_EQ(report.violation, "");
    for (size_t k = 0; k < counts.size(); ++k) counts[k] += report.counts[k];
  }
  for (size_t k = 0; k < counts.size(); ++k) {
    EXPECT_GE(counts[k], kLeastOfAPartsKind) << PartsKindName(static_cast<PartsKind>(k));
  }
}

TEST(PartsSimulatorTest, TheSameSeedIsTheSameRun) {
  const PartsReport first = SimulateParts({.seed = 7}), second = SimulateParts({.seed = 7});
  EXPECT_EQ(first.events, second.events);
  EXPECT_EQ(first.counts, second.counts);
}

class PartsSimulatorMutantTest : public ::testing::TestWithParam<PartsMutant> {};

TEST_P(PartsSimulatorMutantTest, AMutantIsCaught) {
  const PartsMutant& mutant = GetParam();
  for (uint64_t seed = 1; seed <= kMostPartsSeeds; ++seed) {
    const PartsReport report = SimulateParts({.seed = seed, .planted = mutant.planted, .make = mutant.make});
    if (report.violation.find(mutant.noticed) == std::string::npos) continue;
    RecordProperty("seed", static_cast<int>(seed));
    return;
  }
  FAIL() << "no seed of " << kMostPartsSeeds << " noticed";
}

INSTANTIATE_TEST_SUITE_P(Planted, PartsSimulatorMutantTest, ::testing::ValuesIn(PartsMutants()),
                         [](const auto& mutant) { return mutant.param.name; });

}  // namespace
}  // namespace ballast::sim
