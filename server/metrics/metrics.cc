#include "server/metrics/metrics.h"

#include <algorithm>
#include <list>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "prometheus/text_serializer.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/follow.pb.h"
#include "ballast/v1/trainer.pb.h"
#include "server/base/clock.h"
#include "server/metrics/family_series.h"
#include "server/metrics/metric_table.h"
#include "server/metrics/process_metrics.h"
#include "server/metrics/recent_max.h"
#include "server/metrics/relay_series.h"
#include "server/metrics/run_metrics.h"
#include "server/metrics/series_set.h"
#include "server/plan/plan.h"

namespace ballast {
namespace {

constexpr double kKeepEndedSeconds = 60;  // long enough for two more scrapes

std::vector<std::string> MethodNames() {
  std::vector<std::string> names;
  for (const auto* file : {v1::CreateRunRequest::descriptor()->file(), v1::GetServerRequest::descriptor()->file(),
                           v1::SubscribeRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) names.push_back(file->service(s)->method(m)->name());
    }
  }
  names.push_back("other");  // health, reflection, and what does not exist; last, so that unknown names count here
  return names;
}

struct Method {
  prometheus::Counter* started;
  Children<prometheus::Counter> handled;
  prometheus::Histogram* duration;
};

struct Run {
  std::string run_id;
  std::shared_ptr<const std::vector<std::string>> layers;
  std::shared_ptr<const RecentMax> recent_max;
  uint64_t series = 0;  // at most
};

struct EndedRun {
  Run run;
  double ended_at_s;
  SeriesSet series;
};

prometheus::ClientMetric LayerGauge(const std::string& run_id, const std::string& layer, double value) {
  prometheus::ClientMetric metric;
  metric.label = {{"layer", layer}, {"run_id", run_id}};
  metric.gauge.value = value;
  return metric;
}

}  // namespace

MetricsClock MetricsClock::System() { return {.unix_s = UnixSeconds, .steady_s = MonotonicSeconds}; }

class Metrics::Impl : public std::enable_shared_from_this<Metrics::Impl> {
 public:
  Impl(const BuildInfo& build, MetricsClock clock_source);

  Method& MethodOf(std::string_view path);
  std::unique_ptr<RunMetrics> AddRun(const RunLabels& labels);
  void SetMemory(std::string_view device, const PlanBytes& reserved, uint64_t limit_bytes);
  std::string Serialize();
  void KeepEnded(size_t most);
  // In a histogram of the daemon's that is there from its first value on.
  void Observe(FamilyRef histogram, double value) {
    families.of<prometheus::Histogram>(histogram)
        .Add({}, prometheus::Histogram::BucketBoundaries(histogram->buckets.begin(), histogram->buckets.end()))
        .Observe(value);
  }

  const MetricsClock clock;
  Families families;
  SeriesSet daemon{&families, {}};  // series that stay
  prometheus::Gauge* const ready = daemon.AddGauge("ballast_ready");
  prometheus::Gauge* const live = daemon.AddGauge("ballast_live");
  const Children<prometheus::Gauge> state = daemon.AddGauges("ballast_state");
  const Children<prometheus::Gauge> runs = daemon.AddGauges("ballast_runs");
  prometheus::Gauge* const streams = daemon.AddGauge("ballast_streams");
  const std::vector<std::unique_ptr<FamilySeries>> events = AddEvents();  // by index into kMetricFamilies

 private:
  // The daemon's own counters of events.
  std::vector<std::unique_ptr<FamilySeries>> AddEvents();
  // identity: names the run among those that had its id.
  void EndRun(const RecentMax* identity, EndedSeries ended);
  // Takes those that are too many out of ended_, the oldest first.
  std::list<EndedRun> TakeSurplus() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes the series of ended runs that are due, and of the one with this id.
  void Sweep(std::string_view run_id);
  // The runs whose series are shown.
  std::vector<Run> SeenRuns() const;
  prometheus::MetricFamily CollectRecentMax() const;

  std::map<std::string, Method, std::less<>> methods_;
  mutable absl::Mutex mutex_;
  std::list<Run> runs_ ABSL_GUARDED_BY(mutex_);
  std::list<EndedRun> ended_ ABSL_GUARDED_BY(mutex_);  // by the time of their end
  size_t most_ended_ ABSL_GUARDED_BY(mutex_) = 16;
};

Metrics::Impl::Impl(const BuildInfo& build, MetricsClock clock_source) : clock(std::move(clock_source)) {
  daemon
      .AddGauge("ballast_build_info", {{"version", build.version},
                                       {"revision", build.revision},
                                       {"compiler", build.compiler},
                                       {"cuda", build.cuda}})
      ->Set(1);
  daemon.AddGauge("ballast_start_time_timestamp_seconds")->Set(clock.unix_s());
  for (const std::string& name : MethodNames()) {
    const prometheus::Labels label = {{"method", name}};
    methods_.emplace(name, Method{.started = daemon.AddCounter("ballast_rpc_started_total", label),
                                  .handled = daemon.AddCounters("ballast_rpc_handled_total", label),
                                  .duration = daemon.AddHistogram("ballast_rpc_duration_seconds", label)});
  }
  state.SetOnly("starting");
}

// A family with an open label has series of its own, and process_ families are read at each scrape.
std::vector<std::unique_ptr<FamilySeries>> Metrics::Impl::AddEvents() {
  std::vector<std::unique_ptr<FamilySeries>> series(kMetricFamilies.size());
  for (size_t i = 0; i < series.size(); ++i) {
    const MetricFamily& family = kMetricFamilies[i];
    const std::vector<MetricLabel> labels = LabelsOf(family);
    const bool open = std::any_of(labels.begin(), labels.end(), [](const auto& label) { return label.values.empty(); });
    const bool counts_events = family.type == MetricType::kCounter && absl::StartsWith(family.name, "ballast_");
    if (!open && counts_events) {
      series[i] = std::make_unique<FamilySeries>(FamilyRef::At(i), std::vector<std::string>(), &clock.unix_s, &daemon);
    }
  }
  return series;
}

Method& Metrics::Impl::MethodOf(std::string_view path) {
  const auto found = methods_.find(path.substr(path.rfind('/') + 1));  // npos + 1 == 0
  return found != methods_.end() ? found->second : methods_.find("other")->second;
}

std::unique_ptr<RunMetrics> Metrics::Impl::AddRun(const RunLabels& labels) {
  Sweep(labels.run_id);
  const auto recent_max = std::make_shared<RecentMax>(labels.layers.size());
  const uint64_t series = SeriesPerRun(labels.shape());
  std::list<EndedRun> surplus;  // destroyed, and the series with it, after the lock
  {
    absl::MutexLock lock(&mutex_);
    runs_.remove_if([&](const Run& run) { return run.run_id == labels.run_id; });
    runs_.push_back({labels.run_id, std::make_shared<std::vector<std::string>>(labels.layers), recent_max, series});
    surplus = TakeSurplus();
  }
  surplus.clear();
  return std::make_unique<RunSeries>(
      &families, RunSeries::Options{.labels = labels,
                                    .recent_max = recent_max,
                                    .runs = runs,
                                    .clock = clock,
                                    .on_end = [self = shared_from_this(), identity = recent_max.get()](
                                                  EndedSeries ended) { self->EndRun(identity, std::move(ended)); }});
}

void Metrics::Impl::EndRun(const RecentMax* identity, EndedSeries ended) {
  const double now_s = clock.steady_s();
  std::list<EndedRun> surplus;  // destroyed, and the series with it, after the lock
  absl::MutexLock lock(&mutex_);
  const auto run =
      std::find_if(runs_.begin(), runs_.end(), [&](const Run& r) { return r.recent_max.get() == identity; });
  if (run == runs_.end()) return;  // another run has its id: the series are shown as that one's
  ended.state.SetOnly("ended");
  ended.ranks->Set(0);
  ended.ranks_lost->Set(0);
  ended_.push_back({.run = *run, .ended_at_s = now_s, .series = std::move(ended.series)});
  runs_.erase(run);
  surplus = TakeSurplus();
}

std::list<EndedRun> Metrics::Impl::TakeSurplus() {
  std::list<EndedRun> surplus;
  uint64_t series = 0;
  for (const Run& run : runs_) series += run.series;
  for (const EndedRun& ended : ended_) series += ended.run.series;
  while (!ended_.empty() && (ended_.size() > most_ended_ || series > kMostSeries)) {
    series -= ended_.front().run.series;
    surplus.splice(surplus.end(), ended_, ended_.begin());
  }
  return surplus;
}

void Metrics::Impl::KeepEnded(size_t most) {
  std::list<EndedRun> surplus;
  absl::MutexLock lock(&mutex_);
  most_ended_ = most;
  surplus = TakeSurplus();
}

void Metrics::Impl::Sweep(std::string_view run_id) {
  std::list<EndedRun> due;  // destroyed, and the series with it, after the lock
  const double now_s = clock.steady_s();
  absl::MutexLock lock(&mutex_);
  for (auto ended = ended_.begin(); ended != ended_.end();) {
    const auto next = std::next(ended);
    if (ended->run.run_id == run_id || now_s - ended->ended_at_s >= kKeepEndedSeconds) {
      due.splice(due.end(), ended_, ended);
    }
    ended = next;
  }
}

std::vector<Run> Metrics::Impl::SeenRuns() const {
  absl::MutexLock lock(&mutex_);
  std::vector<Run> runs_seen(runs_.begin(), runs_.end());
  for (const EndedRun& ended : ended_) runs_seen.push_back(ended.run);
  return runs_seen;
}

prometheus::MetricFamily Metrics::Impl::CollectRecentMax() const {
  constexpr FamilyRef kFamily = "ballast_rms_ratio_recent_max";
  prometheus::MetricFamily family{
      .name = kFamily->name, .help = kFamily->help, .type = prometheus::MetricType::Gauge, .metric = {}};
  const double now_s = clock.steady_s();
  for (const Run& run : SeenRuns()) {
    for (size_t layer = 0; layer < run.layers->size(); ++layer) {
      const std::optional<double> max = run.recent_max->Max(layer, now_s);
      if (max) family.metric.push_back(LayerGauge(run.run_id, (*run.layers)[layer], *max));
    }
  }
  return family;
}

void Metrics::Impl::SetMemory(std::string_view device, const PlanBytes& reserved, uint64_t limit_bytes) {
  const bool gpu = device.substr(0, 4) == "cuda";
  const FamilyRef used = gpu ? FamilyRef("ballast_gpu_memory_used_bytes") : FamilyRef("ballast_host_memory_used_bytes");
  const FamilyRef limit =
      gpu ? FamilyRef("ballast_gpu_memory_limit_bytes") : FamilyRef("ballast_host_memory_limit_bytes");
  const std::string device_label(device);
  for (const ByteKind& kind : kByteKinds) {
    families.of<prometheus::Gauge>(kind.on_device ? used : FamilyRef("ballast_host_memory_used_bytes"))
        .Add({{"device", device_label}, {"kind", kind.name}})
        .Set(static_cast<double>(reserved.*kind.bytes));
  }
  families.of<prometheus::Gauge>(limit).Add({{"device", device_label}}).Set(static_cast<double>(limit_bytes));
  if (gpu) families.of<prometheus::Counter>("ballast_gpu_failures_total").Add({{"device", device_label}});
}

std::string Metrics::Impl::Serialize() {
  Sweep("");
  std::vector<prometheus::MetricFamily> all = families.Collect();
  for (prometheus::MetricFamily& family : ProcessMetrics().Collect()) all.push_back(std::move(family));
  if (auto recent_max = CollectRecentMax(); !recent_max.metric.empty()) all.push_back(std::move(recent_max));
  // By name and labels: the same series on the same lines at every scrape, for people who compare two.
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  for (prometheus::MetricFamily& family : all) {
    std::sort(family.metric.begin(), family.metric.end(),
              [](const auto& a, const auto& b) { return a.label < b.label; });
  }
  return prometheus::TextSerializer().Serialize(all);
}

Metrics::Metrics(BuildInfo build, MetricsClock clock) : impl_(std::make_shared<Impl>(build, std::move(clock))) {}

Metrics::~Metrics() = default;

std::unique_ptr<RunMetrics> Metrics::AddRun(const RunLabels& labels) { return impl_->AddRun(labels); }

std::unique_ptr<RelayMetrics> Metrics::AddRelayed(const std::string& run_id) {
  return std::make_unique<RelaySeries>(&impl_->families, run_id, impl_->clock.unix_s);
}

void Metrics::OnRpcStarted(std::string_view method) { impl_->MethodOf(method).started->Increment(); }

void Metrics::OnRpcHandled(std::string_view method, std::string_view code, double seconds) {
  Method& of = impl_->MethodOf(method);
  of.handled.at(code).Increment();
  of.duration->Observe(seconds);
}

void Metrics::OnStreams(int delta) { impl_->streams->Increment(delta); }

void Metrics::OnAdmissionRejected(std::string_view reason) { Count("ballast_admission_rejected_total", reason); }

void Metrics::Count(FamilyRef counter, std::string_view label_value, double by) {
  impl_->events[counter.index()]->Add(label_value, by);
}

void Metrics::SetMemory(std::string_view device, const PlanBytes& reserved, uint64_t limit_bytes) {
  impl_->SetMemory(device, reserved, limit_bytes);
}

void Metrics::OnDeviceFailed(std::string_view device) {
  impl_->families.of<prometheus::Counter>("ballast_gpu_failures_total")
      .Add({{"device", std::string(device)}})
      .Increment();
}

void Metrics::SetStorage(uint64_t free_bytes, uint64_t size_bytes) {
  impl_->families.of<prometheus::Gauge>("ballast_storage_free_bytes").Add({}).Set(static_cast<double>(free_bytes));
  impl_->families.of<prometheus::Gauge>("ballast_storage_size_bytes").Add({}).Set(static_cast<double>(size_bytes));
}

void Metrics::SetCertificate(std::string_view file, double not_before_s, double not_after_s) {
  const prometheus::Labels of_file = {{"file", std::string(file)}};
  impl_->families.of<prometheus::Gauge>("ballast_tls_certificate_start_timestamp_seconds")
      .Add(of_file)
      .Set(not_before_s);
  impl_->families.of<prometheus::Gauge>("ballast_tls_certificate_expiry_timestamp_seconds")
      .Add(of_file)
      .Set(not_after_s);
}

void Metrics::SetGrantExpiry(double at_s) {
  impl_->families.of<prometheus::Gauge>("ballast_access_expiry_timestamp_seconds").Add({}).Set(at_s);
}

void Metrics::SetLastReload(std::string_view files, bool successful) {
  impl_->families.of<prometheus::Gauge>("ballast_last_reload_successful")
      .Add({{"files", std::string(files)}})
      .Set(successful ? 1 : 0);
}

void Metrics::SetConnections(uint32_t open) {
  impl_->families.of<prometheus::Gauge>("ballast_connections").Add({}).Set(open);
}

void Metrics::OnRestore(double seconds) { impl_->Observe("ballast_restore_duration_seconds", seconds); }

void Metrics::OnJournalSync(double seconds) { impl_->Observe("ballast_journal_fsync_duration_seconds", seconds); }

void Metrics::SetState(std::string_view state) {
  impl_->state.SetOnly(state);
  impl_->ready->Set(state == "serving" ? 1 : 0);
}

void Metrics::SetLive(bool live) { impl_->live->Set(live ? 1 : 0); }

void Metrics::KeepEnded(size_t runs) { impl_->KeepEnded(runs); }

std::string Metrics::Serialize() const { return impl_->Serialize(); }

std::string Metrics::Describe() { return DescribeFamilies(); }

}  // namespace ballast
