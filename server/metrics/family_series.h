// One run's series of one family.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "server/metrics/metric_families.h"
#include "server/metrics/samples.h"
#include "server/metrics/series_set.h"

namespace ballast {

// Counters, histograms and gauges with a label that lists its values exist, at zero, from here on; other gauges from
// their first finite value on. Threads: a counter's Add is thread-safe; all else is confined to one thread.
class FamilySeries final : public Samples {
 public:
  // The family has no open labels but run_id, which is among those that `set` shares, and layer. `set` and `unix_s`
  // outlive it.
  FamilySeries(FamilyRef family, const std::vector<std::string>& layers, const std::function<double()>* unix_s,
               SeriesSet* set);
  // Copies would count totals twice.
  FamilySeries(const FamilySeries&) = delete;
  FamilySeries& operator=(const FamilySeries&) = delete;

  using Samples::Add;
  using Samples::AddLayer;
  void Add(double value) override { Put(0, value); }
  void Add(std::string_view label_value, double value) override { Put(IndexOf(label_value), value); }
  void AddLayer(size_t layer, double value) override { Put(layer, value); }
  void AddAll(std::span<const double> values) override;
  void SetTotal(std::string_view label_value, double total) override;
  // Gauges go until their next finite value comes.
  void Forget();
  double unix_s() const override { return (*unix_s_)(); }

  const MetricFamily& family() const { return *family_; }

 private:
  struct Child {
    std::variant<std::monostate, prometheus::Counter*, prometheus::Gauge*, prometheus::Histogram*> series;
    double total = 0;  // as told to SetTotal
  };

  void Create(size_t child);
  void Put(size_t child, double value);
  // The last, where the value is not listed.
  size_t IndexOf(std::string_view label_value) const;

  const FamilyRef family_;
  const std::function<double()>* const unix_s_;
  SeriesSet* const set_;
  std::string label_;                // beside run_id; empty: none
  std::vector<std::string> values_;  // of the label, in the order of children_
  std::vector<Child> children_;
};

}  // namespace ballast
