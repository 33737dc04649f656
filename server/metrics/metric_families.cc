#include "server/metrics/metric_families.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

// A histogram's child is its buckets, +Inf, _sum and _count.
uint64_t SeriesPerChild(const MetricFamily& family) {
  return family.type == MetricType::kHistogram ? family.buckets.size() + 3 : 1;
}

const char* TypeName(MetricType type) {
  constexpr std::array kNames = {"counter", "gauge", "histogram"};
  return kNames[static_cast<size_t>(type)];
}

std::string LabelsCell(const MetricFamily& family) {
  return absl::StrJoin(LabelsOf(family), ", ", [](std::string* out, const MetricLabel& label) {
    absl::StrAppend(out, "`", label.name, "`");
    if (!label.values.empty()) absl::StrAppend(out, " = ", absl::StrJoin(label.values, ", "));
  });
}

std::string HelpCell(const MetricFamily& family) {
  std::string help = family.help;
  if (!family.buckets.empty()) absl::StrAppend(&help, " Buckets: ", absl::StrJoin(family.buckets, " "), ".");
  return help;
}

}  // namespace

const MetricFamily& FamilyRef::operator*() const { return kMetricFamilies[index_]; }

std::vector<MetricLabel> LabelsOf(const MetricFamily& family) {
  std::vector<MetricLabel> labels;
  for (const absl::string_view word : absl::StrSplit(family.labels, ' ', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    labels.push_back(
        {.name = std::string(parts.first), .values = absl::StrSplit(parts.second, '|', absl::SkipEmpty())});
  }
  return labels;
}

bool HasFamily(const RunShape& run, const MetricFamily& family) {
  if (run.relayed) return family.of_runs == OfRuns::kFollowed || family.of_runs == OfRuns::kRelayed;
  switch (family.of_runs) {
    case OfRuns::kAll:
      return true;
    case OfRuns::kTwoComponents:
      return run.two_components;
    case OfRuns::kDurable:
      return run.durable;
    case OfRuns::kFollowed:
      return run.followed;
    case OfRuns::kRelayed:
      return false;
  }
  return true;
}

uint64_t SeriesPerRun(const RunShape& run) {
  uint64_t series = 0;
  for (const MetricFamily& family : kMetricFamilies) {
    const std::vector<MetricLabel> labels = LabelsOf(family);
    if (labels.empty() || labels[0].name != "run_id" || !HasFamily(run, family)) continue;
    uint64_t children = 1;
    for (const MetricLabel& label : labels) {
      children *= label.name == "layer"  ? run.layers
                  : label.name == "rank" ? run.ranks
                                         : std::max<uint64_t>(label.values.size(), 1);
    }
    series += children * SeriesPerChild(family);
  }
  return series;
}

std::string DescribeFamilies() {
  std::string out =
      "# Metrics\n\n"
      "What `/metrics` shows, as `ballastd --describe-metrics` prints it: this file is generated, and a test compares "
      "the\n"
      "two. Names and labels are stable. Counters and histograms of a run\n"
      "exist, at zero, from its creation on; a gauge exists from its first value on. A run's series are removed a\n"
      "minute after its end, or when more runs than max_runs have ended since. No gauge is ever NaN: non-finite "
      "values\n"
      "are counted, and the gauge keeps the last finite one. All runs together have 16,000 series at most: a run that\n"
      "would have more is refused, and the series of ended runs, of which those that ended first go first, are "
      "removed\n"
      "as soon as they would be more.\n";
  absl::string_view section;
  for (const MetricFamily& family : kMetricFamilies) {
    if (family.section != section) {
      section = family.section;
      absl::StrAppend(&out, "\n## ", section, "\n\n| name | type | labels | help |\n| --- | --- | --- | --- |\n");
    }
    absl::StrAppend(&out, "| `", family.name, "` | ", TypeName(family.type), " | ", LabelsCell(family), " | ",
                    HelpCell(family), " |\n");
  }
  return out;
}

}  // namespace ballast
