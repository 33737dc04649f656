// The series of one run that this daemon relays: those of following and of relaying. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/metrics/family_series.h"
#include "server/metrics/metrics.h"
#include "server/metrics/series_set.h"

namespace ballast {

class RelaySeries final : public RelayMetrics {
 public:
  // `families` outlive it. unix_s: where times come from.
  RelaySeries(Families* families, const std::string& run_id, std::function<double()> unix_s);

  void Count(FamilyRef counter, std::string_view label_value, double by) override;
  void OnVersion(const VersionFigures& figures) override;
  void OnFollowers(const FollowerFigures& figures) override;
  void OnRelay(const RelayFigures& figures) override;

 private:
  template <class Report>
  void Read(void (*MetricReading::*reading)(const Report&, Samples&), const Report& report);

  const std::function<double()> unix_s_;
  absl::Mutex mu_;
  SeriesSet set_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<FamilySeries>> families_ ABSL_GUARDED_BY(mu_);  // by index into kMetricFamilies
};

}  // namespace ballast
