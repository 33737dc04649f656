// Which daemon gets which tensor, and how what the daemons say of their parts is put together.
#include "client/cpp/parts/part_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/str_cat.h"

#include "client/cpp/parts/merge.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::RunSpec SpecOf(const std::vector<int64_t>& sizes) {
  v1::RunSpec spec;
  spec.set_run_id("r");
  for (size_t i = 0; i < sizes.size(); ++i) {
    spec.add_tensors()->set_name(absl::StrCat("w", i));
    spec.mutable_tensors()->rbegin()->add_shape(sizes[i]);
  }
  return spec;
}

TEST(PartPlacementTest, TheLargestGoFirstToWhoHasLeast) {
  const auto placement = PartPlacement::Of(SpecOf({10, 50, 30, 30, 5, 15}), 2).value();
  EXPECT_THAT(placement.numbers(0), ElementsAre(1, 4, 5));  // 50; 15, where 60 lie on the other side; and 5
  EXPECT_THAT(placement.numbers(1), ElementsAre(0, 2, 3));
}

TEST(PartPlacementTest, TensorsOfEqualSizeGoInTheirOrder) {
  const auto placement = PartPlacement::Of(SpecOf({7, 7, 7, 7, 7}), 3).value();
  EXPECT_THAT(placement.numbers(0), ElementsAre(0, 3));
  EXPECT_THAT(placement.numbers(1), ElementsAre(1, 4));
  EXPECT_THAT(placement.numbers(2), ElementsAre(2));
  EXPECT_EQ(placement[4].part, 1u);
  EXPECT_EQ(placement[4].index, 1u);
}

TEST(PartPlacementTest, ThePartsMakeTheWholeAgain) {
  const v1::RunSpec whole = SpecOf({10, 50, 30, 30, 5, 15});
  const auto placement = PartPlacement::Of(whole, 3).value();
  const std::vector<v1::RunSpec> parts = placement.Split(whole);
  EXPECT_EQ(parts[2].part().index(), 2u);
  EXPECT_EQ(parts[2].part().whole_tensors(), 6u);
  const auto again = PartPlacement::OfParts(parts);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->WholeOf(parts).SerializeAsString(), whole.SerializeAsString());
}

TEST(PartPlacementTest, WhatIsAddedLeavesTheOthersWhereTheyAre) {
  const auto before = PartPlacement::Of(SpecOf({10, 50, 30}), 2).value();
  const PartPlacement after = *before.Extended(SpecOf({10, 50, 30, 100, 1}));
  for (uint32_t tensor = 0; tensor < 3; ++tensor) EXPECT_EQ(after[tensor].part, before[tensor].part) << tensor;
  EXPECT_EQ(after[3].part, 1u);  // of 50 and 40
  EXPECT_EQ(after[4].part, 0u);
  EXPECT_EQ(after.tensors(), 5u);
  EXPECT_THAT(std::string(before.Extended(SpecOf({10, 50})).status().message()),
              HasSubstr("it has 3 tensors, asked for is 2"));
}

TEST(PartPlacementTest, OtherPartsAreRefused) {
  const v1::RunSpec whole = SpecOf({10, 50, 30, 20});
  std::vector<v1::RunSpec> parts = PartPlacement::Of(whole, 2)->Split(whole);
  const auto said = [](const std::vector<v1::RunSpec>& specs) {
    return std::string(PartPlacement::OfParts(specs).status().message());
  };
  EXPECT_THAT(said({parts[1], parts[0]}), HasSubstr("has part 1 of 2"));
  EXPECT_THAT(said({parts[0], whole}), HasSubstr("has all of it"));
  EXPECT_THAT(said({parts[0]}), HasSubstr("has part 0 of 2"));
  v1::RunSpec other = SpecOf({10, 50, 30, 20, 40});
  EXPECT_THAT(said({parts[0], PartPlacement::Of(other, 2)->Split(other)[1]}), HasSubstr("do not make up one run"));
  EXPECT_THAT(std::string(PartPlacement::Of(whole, 5).status().message()), HasSubstr("name fewer"));
}

// Added in the order of the run's tensors, whichever daemon has them: the bits of one daemon's norm.
TEST(MergeTest, SquaresAreAddedInTheOrderOfTheRun) {
  const auto placement = PartPlacement::Of(SpecOf({4, 3, 2, 1}), 2).value();  // 0 and 3, 1 and 2
  const double large = 1e16, none = std::nan("");
  const std::vector<MeasuredStep> measures = {{.squares = {large, 1}}, {.squares = {1, none}}};
  EXPECT_EQ(MergeMeasures(measures, placement, {}).grad_norm(), std::sqrt((large + 1) + 1));
  EXPECT_NE(std::sqrt((large + 1) + 1), std::sqrt(large + (1 + 1)));
}

TEST(MergeTest, TheFirstTensorThatIsNotFiniteIsTheRuns) {
  const auto placement = PartPlacement::Of(SpecOf({4, 3, 2, 1}), 2).value();
  const std::vector<std::string> names = {"a", "b", "c", "d"};
  const std::vector<MeasuredStep> measures = {{.nonfinite_tensors = 1, .squares = {1, 1}, .first_nonfinite = 1},
                                              {.nonfinite_tensors = 2, .squares = {1, 1}, .first_nonfinite = 0}};
  const v1::WholeMeasure whole = MergeMeasures(measures, placement, names);
  EXPECT_EQ(whole.nonfinite_tensors(), 3u);
  EXPECT_EQ(whole.first_nonfinite(), 1u);
  EXPECT_EQ(whole.first_name(), "b");
}

v1::StepResult Outcome(v1::StepOutcome outcome, const std::string& reason = "",
                       std::vector<uint32_t> not_applied = {}) {
  v1::StepResult result;
  result.set_step(5);
  result.set_outcome(outcome);
  result.set_reason(reason);
  result.set_detail(reason.empty() ? "" : "why");
  result.mutable_tensors_not_applied()->Add(not_applied.begin(), not_applied.end());
  return result;
}

TEST(MergeTest, TheOutcomeIsTheWorst) {
  const auto placement = PartPlacement::Of(SpecOf({4, 3, 2, 1}), 2).value();
  const std::vector<std::string> names = {"a:7700", "b:7700"};
  const auto applied = Outcome(v1::STEP_OUTCOME_APPLIED);
  const auto lost = Outcome(v1::STEP_OUTCOME_ABORTED, "rank_lost", {0, 1});
  const auto skipped = Outcome(v1::STEP_OUTCOME_SKIPPED, "discarded", {1});
  const auto torn = MergeResults({applied, lost}, placement, names, false);
  EXPECT_EQ(torn.outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_EQ(torn.reason(), "rank_lost");
  EXPECT_EQ(torn.detail(), "b:7700: why");
  EXPECT_THAT(torn.tensors_not_applied(), ElementsAre(1, 2));
  const auto none = MergeResults({skipped, lost}, placement, names, true);
  EXPECT_EQ(none.outcome(), v1::STEP_OUTCOME_ABORTED);
  EXPECT_THAT(none.tensors_not_applied(), ElementsAre(1, 2, 3));
  EXPECT_EQ(MergeResults({skipped, skipped}, placement, names, true).detail(), "why");
}

TEST(MergeTest, CheckpointsThatNotAllHaveAreNoneOfTheRun) {
  const auto list = [](const std::vector<uint64_t>& steps) {
    v1::ListCheckpointsResponse response;
    for (const uint64_t step : steps) {
      response.add_checkpoints()->set_step(step);
      response.mutable_checkpoints()->rbegin()->set_state("kept");
      response.mutable_checkpoints()->rbegin()->set_bytes(10 + step);
    }
    return response;
  };
  const std::vector<std::string> names = {"a:7700", "b:7700"};
  const auto merged = MergeCheckpoints(std::vector{list({2, 4}), list({4, 6})}, names);
  std::vector<std::string> said;
  for (const auto& one : merged.checkpoints()) said.push_back(absl::StrCat(one.step(), " ", one.state()));
  EXPECT_THAT(said, ElementsAre("2 damaged: only a:7700 has it", "4 kept", "6 damaged: only b:7700 has it"));
  EXPECT_EQ(merged.checkpoints(1).bytes(), 28u) << "of both";
}

}  // namespace
}  // namespace ballast
