// How much /metrics may come to, and that what has a name of its own is not counted as "other".
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "server/metrics/metric_table.h"
#include "server/metrics/metrics.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

size_t SeriesIn(const std::string& exposition) {
  size_t series = 0;
  for (const absl::string_view line : absl::StrSplit(exposition, '\n', absl::SkipEmpty())) {
    if (!absl::StartsWith(line, "#")) ++series;
  }
  return series;
}

// Every label of a run that lists its values may get five more before runs are refused that were not before.
TEST(MetricsBoundsTest, ADaemonWithSixteenRunsHasRoomForMoreLabelValues) {
  uint64_t more = 0;
  for (const MetricFamily& family : kMetricFamilies) {
    const std::vector<MetricLabel> labels = LabelsOf(family);
    if (labels.empty() || labels[0].name != "run_id") continue;
    for (const MetricLabel& label : labels) {
      if (!label.values.empty()) more += 5 * (family.buckets.empty() ? 1 : family.buckets.size() + 3);
    }
  }
  EXPECT_GE(more, 100u);
  const size_t of_daemon = SeriesIn(Metrics(BuildInfo{}).Serialize());
  EXPECT_LE(of_daemon + 16 * (Metrics::SeriesOfRun({.layers = 64, .durable = true, .followed = true}) + more),
            Metrics::kMostSeries);
}

TEST(MetricsBoundsTest, OnlyTheLastRunsThatEndedAreShown) {
  const double now_s = 1000;
  Metrics metrics(BuildInfo{}, {.unix_s = [&] { return 1.7e9 + now_s; }, .steady_s = [&] { return now_s; }});
  metrics.KeepEnded(3);
  const auto stays = metrics.AddRun({.run_id = "stays", .layers = {"h.0"}});
  for (int i = 0; i < 500; ++i) metrics.AddRun({.run_id = absl::StrCat("a", i), .layers = {"h.0"}});
  const std::string exposition = metrics.Serialize();
  for (const char* shown : {"stays", "a497", "a498", "a499"}) {
    EXPECT_THAT(exposition, HasSubstr(absl::StrCat("run_id=\"", shown, "\"")));
  }
  EXPECT_THAT(exposition, Not(HasSubstr("run_id=\"a496\"")));
  EXPECT_LT(SeriesIn(exposition), 2000u);
  metrics.KeepEnded(1);
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("run_id=\"a498\"")));
}

// One large run after another, each deleted: those that have ended are shown as far as the bound leaves them room.
TEST(MetricsBoundsTest, RunsThatEndedTakeNoMoreSeriesThanTheBoundLeavesThem) {
  const double now_s = 1000;
  Metrics metrics(BuildInfo{}, {.unix_s = [&] { return 1.7e9 + now_s; }, .steady_s = [&] { return now_s; }});
  const size_t of_daemon = SeriesIn(metrics.Serialize());
  const uint64_t of_run = Metrics::SeriesOfRun({.layers = 1, .ranks = 1000});
  ASSERT_GT(3 * of_run, Metrics::kMostSeries / 2) << "a few of them are too many";
  uint64_t most = 0;
  for (int i = 0; i < 16; ++i) {
    const auto run = metrics.AddRun({.run_id = absl::StrCat("r", i), .layers = {"h"}, .ranks = 1000});
    for (uint32_t rank = 0; rank < 1000; ++rank) run->OnRankSeen(rank);
    most = std::max<uint64_t>(most, SeriesIn(metrics.Serialize()) - of_daemon);
  }
  EXPECT_LE(most, Metrics::kMostSeries);
  EXPECT_GT(most, Metrics::kMostSeries - of_run) << "no more are let go than must be";
  const std::string exposition = metrics.Serialize();
  EXPECT_TRUE(absl::StrContains(exposition, "run_id=\"r15\"")) << "the last that ended stays a while";
  EXPECT_FALSE(absl::StrContains(exposition, "run_id=\"r0\""));
}

// As StepResult.reason names them in the protocol.
TEST(MetricsBoundsTest, EveryReasonOfAStepHasACounterOfItsOwn) {
  Metrics metrics(BuildInfo{});
  const auto run = metrics.AddRun({.run_id = "a", .layers = {"h"}});
  const auto close = [&](Outcome outcome, const char* name, std::initializer_list<const char*> reasons) {
    for (const char* reason : reasons) {
      run->OnStep({.step = 1, .outcome = outcome, .reason = reason});
      const std::string sample =
          absl::StrCat("ballast_steps_", name, "_total{reason=\"", reason, "\",run_id=\"a\"} 1\n");
      EXPECT_TRUE(absl::StrContains(metrics.Serialize(), sample)) << sample;
    }
  };
  close(Outcome::kSkipped, "skipped", {"nonfinite", "overflow", "spike", "discarded"});
  close(Outcome::kAborted, "aborted", {"disagreement", "nonfinite", "rank_lost", "restarted", "data_loss", "timeout"});
  close(Outcome::kPartial, "partial", {"stopped", "rank_lost", "restarted", "data_loss", "timeout"});
}

}  // namespace
}  // namespace ballast
