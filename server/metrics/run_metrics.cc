#include "server/metrics/run_metrics.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ballast {
namespace {

// A histogram refuses nothing: what is not finite would make its sum NaN for good.
void Observe(prometheus::Histogram* histogram, double value) {
  if (std::isfinite(value)) histogram->Observe(value);
}

}  // namespace

RunSeries::RunSeries(Families* families, Options options)
    : options_(std::move(options)),
      series_(families, {{"run_id", options_.labels.run_id}}),
      state_(series_.AddGauges("ballast_run_state")),
      ranks_(series_.AddGauge("ballast_run_ranks")),
      ranks_expected_(series_.AddGauge("ballast_run_ranks_expected")),
      steps_applied_(series_.AddCounter("ballast_steps_applied_total")),
      steps_partial_(series_.AddCounters("ballast_steps_partial_total")),
      steps_aborted_(series_.AddCounters("ballast_steps_aborted_total")),
      steps_skipped_(series_.AddCounters("ballast_steps_skipped_total")),
      step_duration_(series_.AddHistogram("ballast_step_duration_seconds")),
      phase_duration_(series_.AddHistograms("ballast_step_phase_duration_seconds")),
      rms_distribution_(series_.AddHistogram("ballast_rms_ratio_distribution")),
      gradient_norm_distribution_(series_.AddHistogram("ballast_gradient_norm_distribution")),
      nonfinite_(series_.AddCounter("ballast_gradients_nonfinite_total")),
      blocks_rejected_(series_.AddCounter("ballast_blocks_rejected_total")),
      received_bytes_(series_.AddCounters("ballast_received_bytes_total")),
      sent_bytes_(series_.AddCounters("ballast_sent_bytes_total")),
      chunks_received_(series_.AddCounter("ballast_chunks_received_total")),
      chunks_rejected_(series_.AddCounters("ballast_chunks_rejected_total")),
      chunks_duplicate_(series_.AddCounters("ballast_chunks_duplicate_total")),
      rms_events_(AddLayerCounters("ballast_rms_spike_events_total")),
      curvature_events_(series_.AddCounter("ballast_curvature_events_total")),
      norm_outliers_(series_.AddCounter("ballast_gradient_norm_outliers_total")),
      loss_spikes_(series_.AddCounter("ballast_loss_spikes_total")),
      updates_clipped_(series_.AddCounter("ballast_update_clipped_total")),
      hits_(series_.AddCounters("ballast_predictor_hits_total")),
      misses_(series_.AddCounters("ballast_predictor_misses_total")),
      false_alarms_(series_.AddCounters("ballast_predictor_false_alarms_total")),
      leads_(series_.AddCounters("ballast_predictor_lead_steps_total")),
      spike_actions_(series_.AddCounters("ballast_spike_actions_total")),
      chance_(series_.AddGauges("ballast_predictor_chance_ratio")),
      ranks_series_(AddRanks()),
      rewinds_(series_.AddCounters("ballast_rewinds_total")),
      snapshots_(series_.AddGauge("ballast_snapshots")) {
  AddInfo();
}

std::vector<prometheus::Counter*> RunSeries::AddLayerCounters(FamilyRef family) {
  std::vector<prometheus::Counter*> counters;
  for (const std::string& layer : options_.labels.layers)
    counters.push_back(series_.AddCounter(family, {{"layer", layer}}));
  return counters;
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

RunSeries::~RunSeries() {
  if (!current_state_.empty()) options_.runs.at(current_state_).Decrement();
  options_.on_end({.series = std::move(series_), .state = state_, .ranks = ranks_});
}

void RunSeries::AddInfo() {
  const RunLabels& labels = options_.labels;
  series_
      .AddGauge("ballast_run_info", {{"optimizer", labels.optimizer},
                                     {"master", labels.master},
                                     {"state_format", labels.state},
                                     {"serving", labels.serving}})
      ->Set(1);
  series_.AddGauge("ballast_run_parameters")->Set(static_cast<double>(labels.parameters));
  series_.AddGauge("ballast_rms_spike_threshold")->Set(labels.rms_threshold);
  OnState("waiting");
}

void RunSeries::OnStep(const StepRecord& report) {
  CountOutcome(report);
  nonfinite_->Increment(static_cast<double>(report.nonfinite_tensors));
  blocks_rejected_->Increment(static_cast<double>(report.rejected_blocks));
  if (report.loss) Set(&loss_, *report.loss);
  if (report.outcome == Outcome::kApplied || report.outcome == Outcome::kPartial) ObserveStep(report);
}

void RunSeries::CountOutcome(const StepRecord& report) {
  switch (report.outcome) {
    case Outcome::kApplied:
      return steps_applied_->Increment();
    case Outcome::kSkipped:
      return steps_skipped_.at(report.reason).Increment();
    case Outcome::kAborted:
      return steps_aborted_.at(report.reason).Increment();
    case Outcome::kPartial:
      return steps_partial_.at(report.reason).Increment();
  }
}

void RunSeries::ObserveStep(const StepRecord& report) {
  Set(&step_, static_cast<double>(report.step));
  Set(&last_step_, options_.clock.unix_s());
  Set(&learning_rate_, report.learning_rate);
  Set(&gradient_norm_, report.grad_norm);
  Observe(step_duration_, report.seconds);
  Observe(&phase_duration_.at("receive"), report.receive_seconds);
  Observe(&phase_duration_.at("update"), report.update_seconds);
  Observe(gradient_norm_distribution_, report.grad_norm);
  ObserveRms(report.tensor_rms);
  const size_t layers = std::min(report.layers.size(), options_.labels.layers.size());
  for (size_t layer = 0; layer < layers; ++layer) SetLayer(layer, report.layers[layer]);
}

// All tensors in one call: 20,000 of them would take the histogram's lock 20,000 times.
void RunSeries::ObserveRms(const std::vector<double>& tensor_rms) {
  std::vector<double> counts(kRmsBuckets.size() + 1);
  double sum = 0;
  for (const double rms : tensor_rms) {
    if (!std::isfinite(rms)) continue;
    ++counts[static_cast<size_t>(std::lower_bound(kRmsBuckets.begin(), kRmsBuckets.end(), rms) - kRmsBuckets.begin())];
    sum += rms;
  }
  rms_distribution_->ObserveMultiple(counts, sum);
}

void RunSeries::SetLayer(size_t layer, const StepRecord::Layer& report) {
  if (report.rms_ratio && std::isfinite(*report.rms_ratio)) {
    Set(&rms_ratio_, layer, *report.rms_ratio);
    options_.recent_max->Observe(layer, *report.rms_ratio, options_.clock.steady_s());
  }
  Set(&layer_gradient_norm_, layer, report.gradient_norm);
  if (report.update_to_weight_ratio) Set(&update_to_weight_, layer, *report.update_to_weight_ratio);
  if (report.edq_ratio) Set(&edq_, layer, *report.edq_ratio);
  if (report.unchanged_ratio) Set(&unchanged_, layer, *report.unchanged_ratio);
  if (report.hi_edq_ratio) Set(&hi_edq_, layer, *report.hi_edq_ratio);
}

void RunSeries::OnSpikes(const SpikeReport& report) {
  for (const SpikeEvent& event : report.events) {
    if (event.kind == SpikeKind::kRms) rms_events_[*event.layer]->Increment();
    if (event.kind == SpikeKind::kCurvature) curvature_events_->Increment();
    if (event.kind == SpikeKind::kGradientNorm) norm_outliers_->Increment();
    if (event.kind == SpikeKind::kLoss) loss_spikes_->Increment();
  }
  for (size_t i = 0; i < kPredictors; ++i) ShowScore(static_cast<SpikeKind>(i), report.scores[i]);
  if (report.curvature) Set(&curvature_, *report.curvature);
  updates_clipped_->Increment(static_cast<double>(report.updates_held));
}

void RunSeries::ShowScore(SpikeKind predictor, const SpikeScore::Counts& counts) {
  SpikeScore::Counts& shown = scores_[static_cast<size_t>(predictor)];
  const std::string_view name = NameOf(predictor);
  hits_.at(name).Increment(static_cast<double>(counts.hits - shown.hits));
  misses_.at(name).Increment(static_cast<double>(counts.misses - shown.misses));
  false_alarms_.at(name).Increment(static_cast<double>(counts.false_alarms - shown.false_alarms));
  for (size_t lead = 1; lead < counts.leads.size(); ++lead) {
    leads_.at(name).Increment(static_cast<double>(lead * (counts.leads[lead] - shown.leads[lead])));
  }
  chance_.at(name).Set(counts.chance());
  shown = counts;
}

void RunSeries::OnSpikeAction(std::string_view action) { spike_actions_.at(action).Increment(); }

void RunSeries::Set(LateGauge* late, double value, const prometheus::Labels& labels) {
  if (!std::isfinite(value)) return;
  if (late->gauge == nullptr) late->gauge = series_.AddGauge(late->family, labels);
  late->gauge->Set(value);
}

void RunSeries::Set(LateLayerGauges* late, size_t layer, double value) {
  if (!std::isfinite(value)) return;
  late->gauges.resize(options_.labels.layers.size());
  prometheus::Gauge*& gauge = late->gauges[layer];
  if (gauge == nullptr) gauge = series_.AddGauge(late->family, {{"layer", options_.labels.layers[layer]}});
  gauge->Set(value);
}

void RunSeries::OnReceived(std::string_view transport, uint64_t bytes) {
  received_bytes_.at(transport).Increment(static_cast<double>(bytes));
  chunks_received_->Increment();
}

void RunSeries::OnSent(std::string_view transport, uint64_t bytes) {
  sent_bytes_.at(transport).Increment(static_cast<double>(bytes));
}

void RunSeries::OnDuplicateChunk(bool same_bytes) {
  chunks_duplicate_.at(same_bytes ? "same" : "different").Increment();
}

void RunSeries::OnRejectedChunk(std::string_view reason) { chunks_rejected_.at(reason).Increment(); }

void RunSeries::OnRanks(uint32_t connected, uint32_t expected) {
  ranks_->Set(connected);
  ranks_expected_->Set(expected);
}

void RunSeries::OnReconnect(uint32_t rank) { ranks_series_[rank].reconnects->Increment(); }

void RunSeries::OnRankSeen(uint32_t rank) {
  Set(&ranks_series_[rank].last_seen, options_.clock.unix_s(), {{"rank", std::to_string(rank)}});
}

void RunSeries::OnWaitCaused(uint32_t rank, double seconds) { ranks_series_[rank].wait_caused->Increment(seconds); }

void RunSeries::OnState(std::string_view state) {
  if (!current_state_.empty()) options_.runs.at(current_state_).Decrement();
  current_state_ = std::string(state);
  options_.runs.at(current_state_).Increment();
  state_.SetOnly(current_state_);
}

}  // namespace ballast
