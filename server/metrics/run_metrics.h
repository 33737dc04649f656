// One run's series.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/metrics/family_series.h"
#include "server/metrics/metrics.h"
#include "server/metrics/recent_max.h"
#include "server/metrics/series_set.h"

namespace ballast {

// What a run leaves behind.
struct EndedSeries {
  SeriesSet series;
  Children<prometheus::Gauge> state;
  prometheus::Gauge *ranks, *ranks_lost;
};

// OnStep, OnSpikes, OnCheckpoint, OnDurable, OnActivity, OnState, OnReplaced, OnWentBack and OnRanks: strand-confined; the others: thread-safe.
class RunSeries final : public RunMetrics {
 public:
  struct Options {
    RunLabels labels;
    std::shared_ptr<RecentMax> recent_max;  // of rms_ratio, by layer; shared with the scrape
    Children<prometheus::Gauge> runs;       // ballast_runs
    MetricsClock clock;
    std::function<void(EndedSeries)> on_end;  // keeps the series until they may go
  };

  RunSeries(Families* families, Options options);
  ~RunSeries() override;

  void OnStep(const StepRecord& report) override;
  void OnSpikes(const SpikeReport& report) override;
  void Count(FamilyRef counter, std::string_view label_value, double by) override;
  void OnCheckpoint(const CheckpointFigures& figures) override;
  void OnCheckpointFailed(std::string_view trigger) override;
  void OnDurable(uint64_t step) override;
  void SetCheckpointInterval(double seconds) override { checkpoint_interval_->Set(seconds); }
  void OnVerifyFailed(std::string_view reason) override;
  void OnRestored(std::string_view result) override;
  void OnCopied(std::string_view result) override;
  void OnSpikeAction(std::string_view action) override;
  void OnReceived(std::string_view transport, uint64_t bytes) override;
  void OnSent(std::string_view transport, uint64_t bytes) override;
  void OnDuplicateChunk(bool same_bytes) override;
  void OnRejectedChunk(std::string_view reason) override;
  void OnRanks(uint32_t connected, uint32_t expected) override;
  void OnReconnect(uint32_t rank) override;
  void OnRankSeen(uint32_t rank) override;
  void OnWaitCaused(uint32_t rank, double seconds) override;
  void OnRewind(std::string_view reason) override;
  void OnWentBack(const StepRecord& last) override;
  void OnSnapshots(size_t kept) override { snapshots_->Set(static_cast<double>(kept)); }
  void OnActivity(const ActivityFigures& figures) override;
  void OnVersion(const VersionFigures& figures) override;
  void OnFollowers(const FollowerFigures& figures) override;
  void OnState(std::string_view state) override;
  void OnReplaced() override { LeaveState(); }

 private:
  struct RankSeries {
    prometheus::Counter *reconnects, *wait_caused;
    prometheus::Gauge* last_seen = nullptr;  // from its first value on
  };

  // Those that are read from a report, and counters of events; by index into kMetricFamilies, none for the others.
  std::vector<std::unique_ptr<FamilySeries>> AddFamilies();
  std::vector<RankSeries> AddRanks();
  // By trigger; none where the run is not durable.
  Children<prometheus::Counter> AddCheckpoints(const char* result);
  void AddInfo();
  void LeaveState();
  // To every family with a reading of this report.
  template <class Report>
  void Read(void (*MetricReading::*reading)(const Report&, Samples&), const Report& report);
  void KeepRecentMax(const StepRecord& report);

  const Options options_;
  SeriesSet series_;
  const std::vector<std::unique_ptr<FamilySeries>> families_;

  // What is told in other ways.
  const Children<prometheus::Gauge> state_;
  prometheus::Gauge* const ranks_;
  prometheus::Gauge* const ranks_expected_;
  prometheus::Gauge* const ranks_lost_;
  prometheus::Gauge* const stopped_;
  prometheus::Gauge* const step_opened_;
  prometheus::Gauge* const stall_threshold_;
  prometheus::Gauge* const snapshots_;
  std::vector<RankSeries> ranks_series_;
  const Children<prometheus::Counter> checkpoints_written_, checkpoints_failed_;
  // nullptr: the run is not durable.
  prometheus::Gauge* const checkpoint_interval_;
  prometheus::Gauge* const unsaved_;
  prometheus::Gauge* const hook_failures_;
  std::string current_state_;
};

}  // namespace ballast
