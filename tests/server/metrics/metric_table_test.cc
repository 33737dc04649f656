#include "server/metrics/metric_table.h"

#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/metrics/metrics.h"

namespace ballast {
namespace {

// The value of a series, as text; empty: it is not shown.
std::string ValueOf(const std::string& exposition, const std::string& series) {
  for (const absl::string_view line : absl::StrSplit(exposition, '\n')) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    if (parts.first == series) return std::string(parts.second);
  }
  return "";
}

TEST(MetricTableTest, ARowHasOneReadingAtMostAndOnlyFamiliesOfARunHaveOne) {
  for (const MetricFamily& family : kMetricFamilies) {
    const MetricReading& reading = family.reading;
    const int readings = (reading.of_run != nullptr) + (reading.of_step != nullptr) + (reading.of_spikes != nullptr) +
                         (reading.of_checkpoint != nullptr) + (reading.of_version != nullptr) +
                         (reading.of_followers != nullptr) + (reading.of_relay != nullptr);
    EXPECT_EQ(readings > 0, reading.any()) << family.name;
    EXPECT_LE(readings, 1) << family.name;
    if (readings == 0) continue;
    const std::vector<MetricLabel> labels = LabelsOf(family);
    ASSERT_FALSE(labels.empty()) << family.name;
    EXPECT_EQ(labels[0].name, "run_id") << family.name;
    EXPECT_LE(labels.size(), 2u) << family.name << ": a reading knows one label beside run_id";
    const bool known = labels.size() == 1 || labels[1].name == "layer" || !labels[1].values.empty();
    EXPECT_TRUE(known) << family.name << ": a reading knows layer, and labels that list their values";
  }
}

TEST(MetricTableTest, EventsAreCountedByTheNameOfTheirFamily) {
  Metrics metrics(BuildInfo{});
  const auto run = metrics.AddRun({.run_id = "a", .layers = {"h"}});
  run->Count("ballast_rewinds_total", "operator");
  run->Count("ballast_rewinds_total", "nobody listed it");
  run->Count("ballast_sent_bytes_total", "shm", 7);
  run->Count("ballast_chunks_received_total");
  metrics.Count("ballast_admission_rejected_total", "series");
  const std::string shown = metrics.Serialize();
  EXPECT_EQ(ValueOf(shown, "ballast_rewinds_total{reason=\"operator\",run_id=\"a\"}"), "1");
  EXPECT_EQ(ValueOf(shown, "ballast_rewinds_total{reason=\"other\",run_id=\"a\"}"), "1");
  EXPECT_EQ(ValueOf(shown, "ballast_sent_bytes_total{run_id=\"a\",transport=\"shm\"}"), "7");
  EXPECT_EQ(ValueOf(shown, "ballast_chunks_received_total{run_id=\"a\"}"), "1");
  EXPECT_EQ(ValueOf(shown, "ballast_admission_rejected_total{reason=\"series\"}"), "1");
}

TEST(MetricTableTest, SpikesAreCountedAndScoresAreTotals) {
  Metrics metrics(BuildInfo{});
  const auto run = metrics.AddRun({.run_id = "a", .layers = {"embed", "h"}});
  SpikeReport report{.events = {{.kind = SpikeKind::kRms, .layer = 1}, {.kind = SpikeKind::kLoss}},
                     .scores = {},
                     .curvature = 0.5,
                     .updates_held = 2};
  report.scores[0] = {.hits = 2, .misses = 1, .false_alarms = 3, .steps = 8, .covered = 2, .leads = {0, 1, 0, 1}};
  run->OnSpikes(report);
  report.scores[0].hits = 3, report.scores[0].leads[2] = 1;
  run->OnSpikes(report);
  const std::string shown = metrics.Serialize();
  const std::map<std::string, std::string> wanted = {
      {"ballast_rms_spike_events_total{layer=\"h\",run_id=\"a\"}", "2"},
      {"ballast_rms_spike_events_total{layer=\"embed\",run_id=\"a\"}", "0"},
      {"ballast_loss_spikes_total{run_id=\"a\"}", "2"},
      {"ballast_curvature_events_total{run_id=\"a\"}", "0"},
      {"ballast_curvature_ratio{run_id=\"a\"}", "0.5"},
      {"ballast_update_clipped_total{run_id=\"a\"}", "4"},
      {"ballast_predictor_hits_total{predictor=\"rms\",run_id=\"a\"}", "3"},
      {"ballast_predictor_misses_total{predictor=\"rms\",run_id=\"a\"}", "1"},
      {"ballast_predictor_false_alarms_total{predictor=\"rms\",run_id=\"a\"}", "3"},
      {"ballast_predictor_lead_steps_total{predictor=\"rms\",run_id=\"a\"}", "6"},
      {"ballast_predictor_chance_ratio{predictor=\"rms\",run_id=\"a\"}", "0.25"},
      {"ballast_predictor_hits_total{predictor=\"curvature\",run_id=\"a\"}", "0"}};
  for (const auto& [series, value] : wanted) EXPECT_EQ(ValueOf(shown, series), value) << series;
}

TEST(MetricTableTest, TheDocumentIsWhatTheDaemonPrints) {
  std::ifstream file(BALLAST_METRICS_MD);
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), Metrics::Describe())
      << "write it again: ballastd --describe-metrics > server/metrics/METRICS.md";
}

}  // namespace
}  // namespace ballast
