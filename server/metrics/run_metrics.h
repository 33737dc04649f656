// One run's series.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "server/metrics/metrics.h"
#include "server/metrics/recent_max.h"
#include "server/metrics/series_set.h"

namespace ballast {

// What a run leaves behind.
struct EndedSeries {
  SeriesSet series;
  Children<prometheus::Gauge> state;
  prometheus::Gauge* ranks;
};

// OnStep, OnSpikes, OnState and OnRanks: strand-confined; the others: thread-safe.
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
  void OnSpikeAction(std::string_view action) override;
  void OnReceived(std::string_view transport, uint64_t bytes) override;
  void OnSent(std::string_view transport, uint64_t bytes) override;
  void OnDuplicateChunk(bool same_bytes) override;
  void OnRejectedChunk(std::string_view reason) override;
  void OnRanks(uint32_t connected, uint32_t expected) override;
  void OnReconnect(uint32_t rank) override;
  void OnRankSeen(uint32_t rank) override;
  void OnWaitCaused(uint32_t rank, double seconds) override;
  void OnRewind(std::string_view reason) override { rewinds_.at(reason).Increment(); }
  void OnSnapshots(size_t kept) override { snapshots_->Set(static_cast<double>(kept)); }
  void OnState(std::string_view state) override;

 private:
  // A gauge that exists from its first finite value on.
  struct LateGauge {
    FamilyRef family;
    prometheus::Gauge* gauge = nullptr;
  };
  // Of each rank.
  struct RankSeries {
    prometheus::Counter *reconnects, *wait_caused;
    LateGauge last_seen{"ballast_rank_last_seen_timestamp_seconds"};
  };
  struct LateLayerGauges {
    FamilyRef family;
    std::vector<prometheus::Gauge*> gauges = {};  // by layer
  };

  void AddInfo();
  void CountOutcome(const StepRecord& report);
  void ObserveStep(const StepRecord& report);
  void ObserveRms(const std::vector<double>& tensor_rms);
  void SetLayer(size_t layer, const StepRecord::Layer& report);
  void ShowScore(SpikeKind predictor, const SpikeScore::Counts& counts);
  std::vector<prometheus::Counter*> AddLayerCounters(FamilyRef family);
  std::vector<RankSeries> AddRanks();
  void Set(LateGauge* late, double value, const prometheus::Labels& labels = {});
  void Set(LateLayerGauges* late, size_t layer, double value);

  const Options options_;
  SeriesSet series_;

  const Children<prometheus::Gauge> state_;
  prometheus::Gauge* const ranks_;
  prometheus::Gauge* const ranks_expected_;
  prometheus::Counter* const steps_applied_;
  const Children<prometheus::Counter> steps_partial_, steps_aborted_, steps_skipped_;
  prometheus::Histogram* const step_duration_;
  const Children<prometheus::Histogram> phase_duration_;
  prometheus::Histogram* const rms_distribution_;
  prometheus::Histogram* const gradient_norm_distribution_;
  prometheus::Counter* const nonfinite_;
  prometheus::Counter* const blocks_rejected_;
  const Children<prometheus::Counter> received_bytes_, sent_bytes_;
  prometheus::Counter* const chunks_received_;
  const Children<prometheus::Counter> chunks_rejected_, chunks_duplicate_;
  const std::vector<prometheus::Counter*> rms_events_;  // by layer
  prometheus::Counter *const curvature_events_, *const norm_outliers_, *const loss_spikes_, *const updates_clipped_;
  const Children<prometheus::Counter> hits_, misses_, false_alarms_, leads_, spike_actions_;
  const Children<prometheus::Gauge> chance_;
  std::array<SpikeScore::Counts, kPredictors> scores_ = {};  // shown
  std::vector<RankSeries> ranks_series_;
  const Children<prometheus::Counter> rewinds_;
  prometheus::Gauge* const snapshots_;

  LateGauge step_{"ballast_step"}, last_step_{"ballast_last_step_timestamp_seconds"};
  LateGauge curvature_{"ballast_curvature_ratio"};
  LateGauge learning_rate_{"ballast_learning_rate"}, loss_{"ballast_loss"}, gradient_norm_{"ballast_gradient_norm"};
  LateLayerGauges rms_ratio_{"ballast_rms_ratio"}, layer_gradient_norm_{"ballast_layer_gradient_norm"};
  LateLayerGauges update_to_weight_{"ballast_update_to_weight_ratio"};
  LateLayerGauges edq_{"ballast_edq_ratio"}, unchanged_{"ballast_unchanged_ratio"};
  LateLayerGauges hi_edq_{"ballast_hi_edq_ratio"};

  std::string current_state_;
};

}  // namespace ballast
