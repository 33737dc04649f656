// prometheus-cpp's families, one for each row of metric_table.h, and sets of their children that come and go
// together.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

#include "server/metrics/metric_families.h"

namespace ballast {

// Two sets may hold the same child, which goes with the last of them: a run that was deleted is held by its streams for
// a moment, while another one with its id begins. Thread-safe.
class Families {
 public:
  Families();

  // Each Hold is answered by one Release.
  template <class T, class... Args>
  T* Hold(FamilyRef family, const prometheus::Labels& labels, Args&&... args) {
    absl::MutexLock lock(&mutex_);
    T* child = &of<T>(family).Add(labels, std::forward<Args>(args)...);
    ++holders_[child];
    return child;
  }
  template <class T>
  void Release(FamilyRef family, T* child) {
    absl::MutexLock lock(&mutex_);
    if (--holders_[child] > 0) return;
    holders_.erase(child);
    of<T>(family).Remove(child);
  }

  // T: the prometheus class of the family's type.
  template <class T>
  prometheus::Family<T>& of(FamilyRef family) const {
    return *static_cast<prometheus::Family<T>*>(families_[family.index()]);
  }
  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  prometheus::Registry registry_;
  std::vector<prometheus::Collectable*> families_;  // by index into kMetricFamilies; owned by the registry
  absl::Mutex mutex_;
  std::unordered_map<const void*, size_t> holders_ ABSL_GUARDED_BY(mutex_);
};

// A family's children by the value of the one label whose values it lists. The family's list is closed: a value that is
// not in it counts as its last. Thread-safe after construction.
template <class T>
class Children {
 public:
  void Insert(std::string value, T* child) {
    last_ = child;
    children_.emplace(std::move(value), child);
  }
  T& at(std::string_view value) const {
    const auto found = children_.find(value);
    return found == children_.end() ? *last_ : *found->second;
  }
  // Gauges of a state: 1 at one value, 0 at the others.
  void SetOnly(std::string_view value) const {
    for (const auto& [name, child] : children_) child->Set(name == value ? 1 : 0);
  }

 private:
  std::map<std::string, T*, std::less<>> children_;
  T* last_ = nullptr;
};

// Children that share labels and are let go with this set. Movable owner; thread-compatible, while the children
// themselves are thread-safe. `families` outlives it.
class SeriesSet {
 public:
  SeriesSet(Families* families, prometheus::Labels shared) : families_(families), shared_(std::move(shared)) {}
  SeriesSet(SeriesSet&& other) noexcept { *this = std::move(other); }
  SeriesSet& operator=(SeriesSet&& other) noexcept {
    std::swap(families_, other.families_);
    std::swap(shared_, other.shared_);
    std::swap(releases_, other.releases_);
    return *this;
  }
  ~SeriesSet();

  prometheus::Counter* AddCounter(FamilyRef family, const prometheus::Labels& labels = {});
  prometheus::Gauge* AddGauge(FamilyRef family, const prometheus::Labels& labels = {});
  prometheus::Histogram* AddHistogram(FamilyRef family, const prometheus::Labels& labels = {});
  // Before the others: one that was added here. The pointer is not used any more.
  void Remove(const prometheus::Gauge* gauge) { Release(gauge); }
  // One for each value that the family lists, of the label that `labels` does not have.
  Children<prometheus::Counter> AddCounters(FamilyRef family, const prometheus::Labels& labels = {});
  Children<prometheus::Gauge> AddGauges(FamilyRef family, const prometheus::Labels& labels = {});

 private:
  template <class T, class... Args>
  T* Add(FamilyRef family, prometheus::Labels labels, Args&&... args);
  void Release(const void* child);

  Families* families_ = nullptr;
  prometheus::Labels shared_;
  std::unordered_multimap<const void*, std::function<void()>> releases_;  // by child
};

}  // namespace ballast
