#include "server/metrics/series_set.h"

#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;

template <class Builder>
prometheus::Collectable* Register(Builder builder, const MetricFamily& family, prometheus::Registry& registry) {
  return &builder.Name(family.name).Help(family.help).Register(registry);
}

// Calls add(value, labels) for each value of the family's label that lists its values and is not among `labels`.
template <class Add>
void ForEachValue(FamilyRef family, const Labels& labels, Add add) {
  for (const MetricLabel& label : LabelsOf(*family)) {
    if (labels.contains(label.name)) continue;
    for (const std::string& value : label.values) {
      Labels with_value = labels;
      with_value.emplace(label.name, value);
      add(value, with_value);
    }
  }
}

}  // namespace

Families::Families() {
  for (const MetricFamily& family : kMetricFamilies) {
    switch (family.type) {
      case MetricType::kCounter:
        families_.push_back(Register(prometheus::BuildCounter(), family, registry_));
        break;
      case MetricType::kGauge:
        families_.push_back(Register(prometheus::BuildGauge(), family, registry_));
        break;
      case MetricType::kHistogram:
        families_.push_back(Register(prometheus::BuildHistogram(), family, registry_));
        break;
    }
  }
}

SeriesSet::~SeriesSet() {
  for (const auto& [child, release] : releases_) release();
}

void SeriesSet::Release(const void* child) {
  const auto found = releases_.find(child);
  if (found == releases_.end()) return;
  found->second();
  releases_.erase(found);
}

template <class T, class... Args>
T* SeriesSet::Add(FamilyRef family, Labels labels, Args&&... args) {
  labels.insert(shared_.begin(), shared_.end());
  T* child = families_->Hold<T>(family, labels, std::forward<Args>(args)...);
  releases_.emplace(child, [families = families_, family, child] { families->Release(family, child); });
  return child;
}

Counter* SeriesSet::AddCounter(FamilyRef family, const Labels& labels) { return Add<Counter>(family, labels); }

Gauge* SeriesSet::AddGauge(FamilyRef family, const Labels& labels) { return Add<Gauge>(family, labels); }

Histogram* SeriesSet::AddHistogram(FamilyRef family, const Labels& labels) {
  return Add<Histogram>(family, labels, Histogram::BucketBoundaries(family->buckets.begin(), family->buckets.end()));
}

Children<Counter> SeriesSet::AddCounters(FamilyRef family, const Labels& labels) {
  Children<Counter> children;
  ForEachValue(family, labels,
               [&](const std::string& v, const Labels& l) { children.Insert(v, AddCounter(family, l)); });
  return children;
}

Children<Gauge> SeriesSet::AddGauges(FamilyRef family, const Labels& labels) {
  Children<Gauge> children;
  ForEachValue(family, labels, [&](const std::string& v, const Labels& l) { children.Insert(v, AddGauge(family, l)); });
  return children;
}

}  // namespace ballast
