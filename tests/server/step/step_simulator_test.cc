// The step machine in many drawn worlds, and proof that the simulator would notice: machines with planted faults.
#include "tests/server/step/step_simulator.h"

#include <gtest/gtest.h>

namespace ballast::sim {
namespace {

// Fewer worlds where a sanitizer makes each slow: it is the same machine.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 120, kLeastOfAKind = 10;
#else
constexpr uint64_t kSeeds = 600, kLeastOfAKind = 100;
#endif
constexpr uint64_t kMostSeeds = 600;  // until a mutant is noticed
constexpr uint64_t kLeastEvents = 200;

TEST(StepSimulatorTest, InvariantsHoldAndEveryKindOfEventOccurs) {
  Counts counts = {};
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const SimulatorReport report = Simulate({.seed = seed});
    ASSERT_EQ(report.violation, "");
    EXPECT_GE(report.events, kLeastEvents) << "seed " << seed;
    for (size_t k = 0; k < counts.size(); ++k) counts[k] += report.counts[k];
  }
  for (size_t k = 0; k < counts.size(); ++k) {
    EXPECT_GE(counts[k], kLeastOfAKind) << KindName(static_cast<Kind>(k));
  }
}

TEST(StepSimulatorTest, TheSameSeedIsTheSameRun) {
  const SimulatorReport first = Simulate({.seed = 7}), second = Simulate({.seed = 7});
  EXPECT_EQ(first.events, second.events);
  EXPECT_EQ(first.counts, second.counts);
}

// Ranks that are lost and left out, that come back, that are slow or rewound, with no more room than must be.
Counts WithTheLeast(bool sharded) {
  Counts counts = {};
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const SimulatorReport report = Simulate({.seed = seed, .least = true, .sharded = sharded});
    EXPECT_EQ(report.violation, "");
    for (size_t k = 0; k < counts.size(); ++k) counts[k] += report.counts[k];
  }
  return counts;
}

// Few who hold parts can be left out: nobody else may have them.
void ExpectAllOf(const Counts& counts) {
  for (const Kind kind : {Kind::kSlabWait, Kind::kWantedSent, Kind::kSlowRank, Kind::kForgotten, Kind::kLeftOut,
                          Kind::kWithout, Kind::kRewind, Kind::kResume, Kind::kPartial, Kind::kApplied}) {
    EXPECT_GE(counts[static_cast<size_t>(kind)], kLeastOfAKind / 5) << KindName(kind);
  }
}

TEST(StepSimulatorTest, ReleaseStepsCloseWithPoolsOfTheirLargestTensorAndWindowsOfAChunk) {
  ExpectAllOf(WithTheLeast(/*sharded=*/false));
}

TEST(StepSimulatorTest, SoDoThoseOfRanksThatHoldPartsOfTensors) { ExpectAllOf(WithTheLeast(/*sharded=*/true)); }

class StepSimulatorMutantTest : public ::testing::TestWithParam<Mutant> {};

TEST_P(StepSimulatorMutantTest, AMutantIsCaught) {
  for (uint64_t seed = 1; seed <= kMostSeeds; ++seed) {
    if (const auto report = Simulate({.seed = seed, .make = GetParam().make}); !report.violation.empty()) {
      RecordProperty("violation", report.violation.substr(0, report.violation.find('\n')));
      return;
    }
  }
  FAIL() << "no seed of " << kMostSeeds << " noticed";
}

INSTANTIATE_TEST_SUITE_P(Planted, StepSimulatorMutantTest, ::testing::ValuesIn(Mutants()),
                         [](const auto& mutant) { return mutant.param.name; });

}  // namespace
}  // namespace ballast::sim
