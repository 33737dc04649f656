#include "server/metrics/run_metrics.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "server/metrics/metric_table.h"

namespace ballast {

RunSeries::RunSeries(Families* families, Options options)
    : options_(std::move(options)),
      series_(families, {{"run_id", options_.labels.run_id}}),
      families_(AddFamilies()),
      state_(series_.AddGauges("ballast_run_state")),
      ranks_(series_.AddGauge("ballast_run_ranks")),
      ranks_expected_(series_.AddGauge("ballast_run_ranks_expected")),
      ranks_lost_(series_.AddGauge("ballast_run_ranks_lost")),
      stopped_(series_.AddGauge("ballast_run_stopped")),
      step_opened_(series_.AddGauge("ballast_step_open_timestamp_seconds")),
      stall_threshold_(series_.AddGauge("ballast_step_stall_threshold_seconds")),
      snapshots_(series_.AddGauge("ballast_snapshots")),
      ranks_series_(AddRanks()),
      checkpoints_written_(AddCheckpoints("success")),
      checkpoints_failed_(AddCheckpoints("failed")),
      checkpoint_interval_(options_.labels.durable ? series_.AddGauge("ballast_checkpoint_interval_target_seconds")
                                                   : nullptr),
      unsaved_(options_.labels.durable ? series_.AddGauge("ballast_unsaved_training_seconds") : nullptr),
      hook_failures_(options_.labels.durable ? series_.AddGauge("ballast_checkpoint_hook_failures_in_a_row")
                                             : nullptr) {
  AddInfo();
}

std::vector<std::unique_ptr<FamilySeries>> RunSeries::AddFamilies() {
  std::vector<std::unique_ptr<FamilySeries>> families(kMetricFamilies.size());
  for (size_t i = 0; i < families.size(); ++i) {
    const MetricFamily& family = kMetricFamilies[i];
    const std::vector<MetricLabel> labels = LabelsOf(family);
    if (labels.empty() || labels.front().name != "run_id" || !HasFamily(options_.labels.shape(), family)) continue;
    // One with two labels beside run_id is told in other ways, like those of ranks.
    const bool counts_events =
        family.type == MetricType::kCounter && labels.size() <= 2 && labels.back().name != "rank";
    if (!counts_events && !family.reading.any()) continue;
    families[i] =
        std::make_unique<FamilySeries>(FamilyRef::At(i), options_.labels.layers, &options_.clock.unix_s, &series_);
  }
  return families;
}

std::vector<RunSeries::RankSeries> RunSeries::AddRanks() {
  std::vector<RankSeries> ranks;
  for (uint32_t rank = 0; rank < options_.labels.ranks; ++rank) {
    const prometheus::Labels labels = {{"rank", std::to_string(rank)}};
    ranks.push_back({.reconnects = series_.AddCounter("ballast_rank_reconnects_total", labels),
                     .wait_caused = series_.AddCounter("ballast_rank_wait_caused_seconds_total", labels)});
  }
  return ranks;
}

Children<prometheus::Counter> RunSeries::AddCheckpoints(const char* result) {
  if (!options_.labels.durable) return {};
  return series_.AddCounters("ballast_checkpoints_total", {{"result", result}});
}

RunSeries::~RunSeries() {
  LeaveState();
  options_.on_end({.series = std::move(series_), .state = state_, .ranks = ranks_, .ranks_lost = ranks_lost_});
}

void RunSeries::AddInfo() {
  const RunLabels& labels = options_.labels;
  series_
      .AddGauge("ballast_run_info", {{"optimizer", labels.optimizer},
                                     {"master", labels.master},
                                     {"state_format", labels.state},
                                     {"serving", labels.serving}})
      ->Set(1);
  Read(&MetricReading::of_run, labels);
  OnState("waiting");
}

template <class Report>
void RunSeries::Read(void (*MetricReading::*reading)(const Report&, Samples&), const Report& report) {
  for (const std::unique_ptr<FamilySeries>& series : families_) {
    if (series == nullptr) continue;
    if (const auto read = series->family().reading.*reading; read != nullptr) read(report, *series);
  }
}

void RunSeries::OnStep(const StepRecord& report) {
  Read(&MetricReading::of_step, report);
  KeepRecentMax(report);
}

// Shown by the scrape, which knows how long ago it was.
void RunSeries::KeepRecentMax(const StepRecord& report) {
  if (!reading::Updated(report)) return;
  const size_t layers = std::min(report.layers.size(), options_.labels.layers.size());
  for (size_t layer = 0; layer < layers; ++layer) {
    const std::optional<double> rms = report.layers[layer].rms_ratio;
    if (rms && std::isfinite(*rms)) options_.recent_max->Observe(layer, *rms, options_.clock.steady_s());
  }
}

void RunSeries::OnSpikes(const SpikeReport& report) { Read(&MetricReading::of_spikes, report); }

void RunSeries::Count(FamilyRef counter, std::string_view label_value, double by) {
  families_[counter.index()]->Add(label_value, by);
}

void RunSeries::OnDuplicateChunk(bool same_bytes) {
  Count("ballast_chunks_duplicate_total", same_bytes ? "same" : "different", 1);
}

void RunSeries::OnReceived(std::string_view transport, uint64_t bytes) {
  Count("ballast_received_bytes_total", transport, static_cast<double>(bytes));
  Count("ballast_chunks_received_total", "", 1);
}

void RunSeries::OnSent(std::string_view transport, uint64_t bytes) {
  Count("ballast_sent_bytes_total", transport, static_cast<double>(bytes));
}

void RunSeries::OnRejectedChunk(std::string_view reason) { Count("ballast_chunks_rejected_total", reason, 1); }

void RunSeries::OnRewind(std::string_view reason) { Count("ballast_rewinds_total", reason, 1); }

// Counters and histograms are of all steps that were made, and so is the time of the last one.
void RunSeries::OnWentBack(const StepRecord& last) {
  for (const std::unique_ptr<FamilySeries>& series : families_) {
    if (series == nullptr || series->family().type != MetricType::kGauge) continue;
    const MetricReading& reading = series->family().reading;
    if (reading.of_step == nullptr || reading.of_step == reading::TimeOfUpdate) continue;
    series->Forget();
    reading.of_step(last, *series);
  }
  constexpr FamilyRef kCurvature = "ballast_curvature_ratio", kStep = "ballast_step";
  if (const auto& curvature = families_[kCurvature.index()]; curvature != nullptr) curvature->Forget();
  families_[kStep.index()]->AddNumber(last.step);  // whatever its outcome
}

void RunSeries::OnCheckpoint(const CheckpointFigures& figures) {
  checkpoints_written_.at(figures.trigger).Increment();
  Read(&MetricReading::of_checkpoint, figures);
}

void RunSeries::OnVersion(const VersionFigures& figures) { Read(&MetricReading::of_version, figures); }

void RunSeries::OnFollowers(const FollowerFigures& figures) { Read(&MetricReading::of_followers, figures); }

void RunSeries::OnCheckpointFailed(std::string_view trigger) { checkpoints_failed_.at(trigger).Increment(); }

void RunSeries::OnDurable(uint64_t step) {
  constexpr FamilyRef kFamily = "ballast_durable_step";
  families_[kFamily.index()]->AddNumber(step);
}

void RunSeries::OnVerifyFailed(std::string_view reason) {
  Count("ballast_checkpoint_verify_failures_total", reason, 1);
}

void RunSeries::OnRestored(std::string_view result) { Count("ballast_restores_total", result, 1); }

void RunSeries::OnCopied(std::string_view result) {
  if (result == "success") hook_failures_->Set(0);
  if (result == "failed" || result == "timeout") hook_failures_->Increment();
}

void RunSeries::OnSpikeAction(std::string_view action) { Count("ballast_spike_actions_total", action, 1); }

void RunSeries::OnRanks(uint32_t connected, uint32_t expected) {
  ranks_->Set(connected);
  ranks_expected_->Set(expected);
}

void RunSeries::OnReconnect(uint32_t rank) { ranks_series_[rank].reconnects->Increment(); }

void RunSeries::OnRankSeen(uint32_t rank) {
  prometheus::Gauge*& last_seen = ranks_series_[rank].last_seen;
  if (last_seen == nullptr) {
    last_seen = series_.AddGauge("ballast_rank_last_seen_timestamp_seconds", {{"rank", std::to_string(rank)}});
  }
  last_seen->Set(options_.clock.unix_s());
}

void RunSeries::OnWaitCaused(uint32_t rank, double seconds) { ranks_series_[rank].wait_caused->Increment(seconds); }

void RunSeries::LeaveState() {
  if (!current_state_.empty()) options_.runs.at(current_state_).Decrement();
  current_state_.clear();
}

void RunSeries::OnActivity(const ActivityFigures& figures) {
  ranks_lost_->Set(figures.ranks_lost);
  stopped_->Set(figures.stopped ? 1 : 0);
  step_opened_->Set(figures.step_opened_at_s);
  stall_threshold_->Set(figures.stall_after_s);
  if (unsaved_ != nullptr) unsaved_->Set(figures.unsaved_s);
}

void RunSeries::OnState(std::string_view state) {
  LeaveState();
  current_state_ = std::string(state);
  options_.runs.at(current_state_).Increment();
  state_.SetOnly(current_state_);
}

}  // namespace ballast
