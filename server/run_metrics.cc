#include "server/run_metrics.h"

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
      reconnects_(series_.AddCounters("ballast_rank_reconnects_total")),
      rewinds_(series_.AddCounters("ballast_rewinds_total")),
      snapshots_(series_.AddGauge("ballast_snapshots")) {
  AddInfo();
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
  OnState("waiting");
}

void RunSeries::OnStep(const StepReport& report) {
  CountOutcome(report);
  nonfinite_->Increment(static_cast<double>(report.nonfinite_tensors));
  blocks_rejected_->Increment(static_cast<double>(report.rejected_blocks));
  if (report.loss) Set(&loss_, *report.loss);
  if (report.outcome == Outcome::kApplied || report.outcome == Outcome::kPartial) ObserveStep(report);
}

void RunSeries::CountOutcome(const StepReport& report) {
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

void RunSeries::ObserveStep(const StepReport& report) {
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

void RunSeries::SetLayer(size_t layer, const StepReport::Layer& report) {
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

void RunSeries::Set(LateGauge* late, double value) {
  if (!std::isfinite(value)) return;
  if (late->gauge == nullptr) late->gauge = series_.AddGauge(late->family);
  late->gauge->Set(value);
}

void RunSeries::Set(LateLayerGauges* late, size_t layer, double value) {
  if (!std::isfinite(value)) return;
  late->gauges.resize(options_.labels.layers.size());
  prometheus::Gauge*& gauge = late->gauges[layer];
  if (gauge == nullptr) gauge = series_.AddGauge(late->family, {{"layer", options_.labels.layers[layer]}});
  gauge->Set(value);
}

void RunSeries::OnReceived(uint64_t bytes) {
  received_bytes_.at("grpc").Increment(static_cast<double>(bytes));
  chunks_received_->Increment();
}

void RunSeries::OnSent(uint64_t bytes) { sent_bytes_.at("grpc").Increment(static_cast<double>(bytes)); }

void RunSeries::OnDuplicateChunk(bool same_bytes) {
  chunks_duplicate_.at(same_bytes ? "same" : "different").Increment();
}

void RunSeries::OnRejectedChunk(std::string_view reason) { chunks_rejected_.at(reason).Increment(); }

void RunSeries::OnRanks(uint32_t connected, uint32_t expected) {
  ranks_->Set(connected);
  ranks_expected_->Set(expected);
}

void RunSeries::OnReconnect() { reconnects_.at("0").Increment(); }

void RunSeries::OnState(std::string_view state) {
  if (!current_state_.empty()) options_.runs.at(current_state_).Decrement();
  current_state_ = std::string(state);
  options_.runs.at(current_state_).Increment();
  state_.SetOnly(current_state_);
}

}  // namespace ballast
