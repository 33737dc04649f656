#include "server/metrics/relay_series.h"

#include <utility>

#include "server/metrics/metric_table.h"

namespace ballast {

RelaySeries::RelaySeries(Families* families, const std::string& run_id, std::function<double()> unix_s)
    : unix_s_(std::move(unix_s)), set_(families, {{"run_id", run_id}}), families_(kMetricFamilies.size()) {
  absl::MutexLock lock(&mu_);
  for (size_t i = 0; i < families_.size(); ++i) {
    if (!HasFamily({.relayed = true}, kMetricFamilies[i])) continue;
    families_[i] = std::make_unique<FamilySeries>(FamilyRef::At(i), std::vector<std::string>(), &unix_s_, &set_);
  }
}

void RelaySeries::Count(FamilyRef counter, std::string_view label_value, double by) {
  absl::MutexLock lock(&mu_);
  families_[counter.index()]->Add(label_value, by);
}

template <class Report>
void RelaySeries::Read(void (*MetricReading::*reading)(const Report&, Samples&), const Report& report) {
  absl::MutexLock lock(&mu_);
  for (const std::unique_ptr<FamilySeries>& series : families_) {
    if (series == nullptr) continue;
    if (const auto read = series->family().reading.*reading; read != nullptr) read(report, *series);
  }
}

void RelaySeries::OnVersion(const VersionFigures& figures) { Read(&MetricReading::of_version, figures); }
void RelaySeries::OnFollowers(const FollowerFigures& figures) { Read(&MetricReading::of_followers, figures); }
void RelaySeries::OnRelay(const RelayFigures& figures) { Read(&MetricReading::of_relay, figures); }

}  // namespace ballast
