// A family of time series, as its row in the table of metrics describes it (metric_table.h), and what follows from all
// rows: METRICS.md and the count of series for admission.
//
// Prometheus's naming rules hold (one unit, base units, _total for counters); the label of a run is run_id, never job;
// there is no label for tensors. `labels` are separated by blanks; `name=a|b` says that a and b are all its values, and
// that a value outside the list counts as its last. Thread-safe: constants.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace ballast {

class Samples;
struct RunLabels;
struct CheckpointFigures;
struct FollowerFigures;
struct RelayFigures;
struct SpikeReport;
struct StepRecord;
struct VersionFigures;

enum class MetricType { kCounter, kGauge, kHistogram };

// How a family's values follow from what a run reports: a function of one of the reports. Without one, the family's
// values are events, which RunMetrics and Metrics are told of.
struct MetricReading {
  using OfRun = void (*)(const RunLabels& run, Samples& to);                        // once, when the run is added
  using OfStep = void (*)(const StepRecord& step, Samples& to);                     // at each closed step
  using OfSpikes = void (*)(const SpikeReport& spikes, Samples& to);                // likewise
  using OfCheckpoint = void (*)(const CheckpointFigures& checkpoint, Samples& to);  // when one is durable
  using OfVersion = void (*)(const VersionFigures& version, Samples& to);           // when one is made
  using OfFollowers = void (*)(const FollowerFigures& followers, Samples& to);      // when they change
  using OfRelay = void (*)(const RelayFigures& relay, Samples& to);                 // likewise

  OfRun of_run = nullptr;
  OfStep of_step = nullptr;
  OfSpikes of_spikes = nullptr;
  OfCheckpoint of_checkpoint = nullptr;
  OfVersion of_version = nullptr;
  OfFollowers of_followers = nullptr;
  OfRelay of_relay = nullptr;

  constexpr MetricReading() = default;
  template <class Function>
  constexpr MetricReading(Function read) {  // NOLINT: a function is a reading
    if constexpr (std::is_convertible_v<Function, OfRun>) {
      of_run = read;
    } else if constexpr (std::is_convertible_v<Function, OfStep>) {
      of_step = read;
    } else if constexpr (std::is_convertible_v<Function, OfSpikes>) {
      of_spikes = read;
    } else if constexpr (std::is_convertible_v<Function, OfCheckpoint>) {
      of_checkpoint = read;
    } else if constexpr (std::is_convertible_v<Function, OfVersion>) {
      of_version = read;
    } else if constexpr (std::is_convertible_v<Function, OfFollowers>) {
      of_followers = read;
    } else {
      of_relay = read;
    }
  }
  constexpr bool any() const {
    return of_run != nullptr || of_step != nullptr || of_spikes != nullptr || of_checkpoint != nullptr ||
           of_version != nullptr || of_followers != nullptr || of_relay != nullptr;
  }
};

// Which runs have a family; of the others' it has no series.
enum class OfRuns { kAll, kTwoComponents, kDurable, kFollowed, kRelayed };

struct MetricFamily {
  const char* section;
  const char* name;
  MetricType type;
  const char* labels;
  const char* help;
  MetricReading reading = {};
  std::span<const double> buckets = {};
  OfRuns of_runs = OfRuns::kAll;
};

// A family by its name, checked when compiling: who names one includes metric_table.h.
class FamilyRef {
 public:
  consteval FamilyRef(const char* name);  // NOLINT: a name is a reference
  static constexpr FamilyRef At(size_t index) { return FamilyRef(index); }
  constexpr size_t index() const { return index_; }
  const MetricFamily& operator*() const;
  const MetricFamily* operator->() const { return &**this; }

 private:
  explicit constexpr FamilyRef(size_t index) : index_(index) {}
  size_t index_;
};

struct MetricLabel {
  std::string name;
  std::vector<std::string> values;  // empty: open
};
std::vector<MetricLabel> LabelsOf(const MetricFamily& family);

// What a run's number of series depends on.
struct RunShape {
  uint64_t layers = 1;
  uint64_t ranks = 1;
  bool two_components = false;  // some weight is stored in two
  bool durable = false;         // it is written to a disk
  bool followed = false;        // readers may follow it
  bool relayed = false;         // its versions are another daemon's: it has the families of these two kinds alone
};
bool HasFamily(const RunShape& run, const MetricFamily& family);
// Time series (lines of /metrics) of all families with a run_id, for one run.
uint64_t SeriesPerRun(const RunShape& run);
// METRICS.md.
std::string DescribeFamilies();

}  // namespace ballast
