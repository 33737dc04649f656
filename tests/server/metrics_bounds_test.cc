// How much /metrics may come to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "server/metrics.h"

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
  EXPECT_LE(of_daemon + 16 * (Metrics::SeriesOfRun({.layers = 64}) + more), Metrics::kMostSeries);
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

}  // namespace
}  // namespace ballast
