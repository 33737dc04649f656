#include "server/metrics/family_series.h"

#include <algorithm>
#include <cmath>

namespace ballast {

FamilySeries::FamilySeries(FamilyRef family, const std::vector<std::string>& layers,
                           const std::function<double()>* unix_s, SeriesSet* set)
    : family_(family), unix_s_(unix_s), set_(set) {
  bool listed = false;
  for (const MetricLabel& label : LabelsOf(*family)) {
    if (label.name == "run_id") continue;
    label_ = label.name;
    listed = !label.values.empty();
    values_ = listed ? label.values : layers;
  }
  children_.resize(label_.empty() ? 1 : values_.size());
  if (family->type == MetricType::kGauge && !listed) return;
  for (size_t child = 0; child < children_.size(); ++child) Create(child);
}

void FamilySeries::Create(size_t child) {
  const prometheus::Labels labels =
      label_.empty() ? prometheus::Labels{} : prometheus::Labels{{label_, values_[child]}};
  switch (family_->type) {
    case MetricType::kCounter:
      children_[child].series = set_->AddCounter(family_, labels);
      break;
    case MetricType::kGauge:
      children_[child].series = set_->AddGauge(family_, labels);
      break;
    case MetricType::kHistogram:
      children_[child].series = set_->AddHistogram(family_, labels);
      break;
  }
}

// A histogram refuses nothing: what is not finite would make its sum NaN for good.
void FamilySeries::Put(size_t child, double value) {
  if (!std::isfinite(value) || child >= children_.size()) return;
  auto& series = children_[child].series;
  if (std::holds_alternative<std::monostate>(series)) Create(child);
  if (auto* const* counter = std::get_if<prometheus::Counter*>(&series)) (*counter)->Increment(value);
  if (auto* const* gauge = std::get_if<prometheus::Gauge*>(&series)) (*gauge)->Set(value);
  if (auto* const* histogram = std::get_if<prometheus::Histogram*>(&series)) (*histogram)->Observe(value);
}

// In one call: 20,000 values would take the histogram's lock 20,000 times.
void FamilySeries::AddAll(std::span<const double> values) {
  const std::span<const double> bounds = family_->buckets;
  std::vector<double> counts(bounds.size() + 1);
  double sum = 0;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    ++counts[static_cast<size_t>(std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin())];
    sum += value;
  }
  std::get<prometheus::Histogram*>(children_[0].series)->ObserveMultiple(counts, sum);
}

void FamilySeries::SetTotal(std::string_view label_value, double total) {
  const size_t child = IndexOf(label_value);
  Put(child, total - children_[child].total);
  children_[child].total = total;
}

void FamilySeries::Forget() {
  for (Child& child : children_) {
    auto* const* gauge = std::get_if<prometheus::Gauge*>(&child.series);
    if (gauge == nullptr) continue;
    set_->Remove(*gauge);
    child.series = std::monostate();
  }
}

size_t FamilySeries::IndexOf(std::string_view label_value) const {
  const auto found = std::find(values_.begin(), values_.end(), label_value);
  return found == values_.end() ? children_.size() - 1 : static_cast<size_t>(found - values_.begin());
}

}  // namespace ballast
