#include "server/run/step_judge.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/spec/spike_text.h"

namespace ballast {
namespace {

std::vector<double> RmsThresholds(const RunSpec& spec) {
  std::vector<double> thresholds;
  for (const LayerSpec& layer : spec.layers) thresholds.push_back(layer.rms_threshold);
  return thresholds;
}

std::optional<double> Highest(const std::vector<LayerValue>& layers) {
  std::optional<double> highest;
  for (const LayerValue& layer : layers) highest = std::max(highest, layer.value);  // none is less than any
  return highest;
}

}  // namespace

StepJudge::StepJudge(Environment environment)
    : environment_(std::move(environment)),
      detector_(environment_.spec->spikes, RmsThresholds(*environment_.spec)),
      policy_(environment_.spec->spikes),
      losses_(environment_.spec->ranks) {}

std::optional<double> StepJudge::Loss() const {
  double sum = 0;
  uint32_t ranks = 0;
  for (const std::map<uint32_t, double>& losses : losses_) {
    if (losses.empty()) continue;
    double of_rank = 0;
    for (const auto& [_, loss] : losses) of_rank += loss;
    sum += of_rank / static_cast<double>(losses.size());
    ++ranks;
  }
  return ranks == 0 ? std::nullopt : std::optional<double>(sum / ranks);
}

std::optional<uint32_t> StepJudge::FirstNonfiniteLoss() const {
  for (uint32_t rank = 0; rank < losses_.size(); ++rank) {
    for (const auto& [_, loss] : losses_[rank]) {
      if (!std::isfinite(loss)) return rank;
    }
  }
  return std::nullopt;
}

void StepJudge::Begin() {
  losses_.assign(losses_.size(), {});
  measured_ = false;
}

void StepJudge::Measure(const effect::Measure& measure) {
  measuring_ = measure.step;
  Ask(measure.step, measure.slabs);
}

void StepJudge::Judge(const effect::Judge& judge) {
  judged_ = judge.slabs;
  judging_ = judge.step;
  if (measured_ || environment_.settings->whole)
    return JudgeMeasured();  // a part without gradients has measured nothing
  if (!JudgesGradients(*environment_.spec) && !environment_.settings->max_grad_norm) {
    return Pronounce({.step = judge.step});
  }
  Ask(judge.step, judge.slabs);
}

void StepJudge::Ask(uint64_t step, const std::vector<std::optional<Slab>>& slabs) {
  for (uint32_t i = 0; i < slabs.size(); ++i) {
    if (!slabs[i]) continue;
    ++awaited_;
    environment_.updater->Measure(step, i, *slabs[i], [this] { OnAnswer(); });
  }
}

void StepJudge::OnAnswer() {
  if (--awaited_ == 0) OnAllAnswered();
  environment_.settle();
}

// What is answered may be of a step that has closed.
void StepJudge::OnAllAnswered() {
  if (const uint64_t step = std::exchange(measuring_, 0)) {
    measured_ = measured_ || IsOpen(step);
    return environment_.measured(step);
  }
  if (!IsOpen(judging_)) return;
  measured_ = true;
  environment_.updater->probed() ? Pronounce(verdict_) : JudgeMeasured();
}

bool StepJudge::IsOpen(uint64_t step) const {
  return environment_.machine->step_open() && environment_.machine->step() == step;
}

// A step that is to be applied may first be tried, for what it would do.
void StepJudge::JudgeMeasured() {
  const RunSpec& spec = *environment_.spec;
  const GradientFindings found = WholeFindings();
  verdict_ = JudgeStep(spec, judging_, environment_.settings->loss_scale, found);
  const bool applies = verdict_.outcome == Outcome::kApplied;
  const std::optional<double> of_step = environment_.settings->max_grad_norm;
  if (applies) environment_.settings->clip = ClipCoefficient(of_step ? of_step : spec.max_grad_norm, found.norm);
  if (!applies || spec.spikes.action != SpikeAction::kSkip) return Pronounce(verdict_);
  bool tries = false;
  for (uint32_t i = 0; i < judged_.size(); ++i) {
    // What is over a matrix has no RMS_t to be looked at, and a trial of it takes as long as the update.
    if (!judged_[i] || IsOverMatrix(spec, spec.tensors[i])) continue;
    DryUpdate(i, *judged_[i]);
    tries = true;
  }
  if (tries) return;
  if (spec.part) JudgeSpikes(&verdict_);  // other parts may have tensors that are tried
  Pronounce(verdict_);
}

GradientFindings StepJudge::WholeFindings() const {
  return environment_.settings->whole.value_or(environment_.updater->statistics().Findings());
}

void StepJudge::DryUpdate(uint32_t tensor, Slab slab) {
  const auto on_answer = [this] { OnAnswer(); };
  ++awaited_;
  environment_.updater->DryUpdate(judging_, tensor, slab, on_answer);
  if (!ProbesCurvature(*environment_.spec, environment_.spec->tensors[tensor])) return;
  ++awaited_;
  environment_.updater->ProbeCurvature(judging_, tensor, slab, on_answer);
}

void StepJudge::Pronounce(event::Verdict verdict) {
  judging_ = 0;
  if (environment_.updater->probed()) JudgeSpikes(&verdict);
  // A step that is not applied tells nobody that its gradient was clipped.
  if (verdict.outcome != Outcome::kApplied) environment_.settings->clip = 1;
  environment_.pronounce(std::move(verdict));
}

void StepJudge::JudgeSpikes(event::Verdict* verdict) {
  const std::vector<SpikeEvent> foreseen = detector_.Foresee(FindingsOf(verdict->step));
  if (!policy_.Skips(foreseen)) return;
  verdict->outcome = Outcome::kSkipped;
  verdict->reason = "spike";
  verdict->detail = SpikeText(*policy_.ActedOn(foreseen), *environment_.spec);
}

StepFindings StepJudge::FindingsOf(uint64_t step) const {
  const StepStatistics& statistics = environment_.updater->statistics();
  const GradientFindings gradients = statistics.Findings();
  return {.step = step,
          .rms = statistics.RmsByLayer(),
          .curvature = statistics.CurvatureByLayer(),
          .loss = Loss(),
          .nonfinite_loss_rank = FirstNonfiniteLoss(),
          .grad_norm = WholeFindings().norm,
          .nonfinite_tensors = gradients.nonfinite_tensors,
          .first_nonfinite = gradients.first_nonfinite};
}

void StepJudge::Observe(StepRecord* record) {
  StepFindings found = FindingsOf(record->step);
  // Gradients that a trainer scales up until they overflow are no finding; a step that nobody measured has no norm.
  if (record->reason == "overflow") found.nonfinite_tensors = 0;
  if (record->outcome == Outcome::kAborted) found.grad_norm.reset();
  found.applied = record->outcome == Outcome::kApplied || record->outcome == Outcome::kPartial;
  if (!record->discarded()) record->spikes = detector_.Observe(found);
  record->curvature_ratio = Highest(found.curvature);
  for (const LayerValue& layer : found.rms) {
    record->layer_rms.push_back(layer.value ? static_cast<float>(*layer.value) : std::nanf(""));
  }
}

SpikeReport StepJudge::ReportOf(const StepRecord& record) const {
  SpikeReport report{.events = record.spikes};
  for (size_t i = 0; i < kPredictors; ++i) report.scores[i] = detector_.score(static_cast<SpikeKind>(i)).counts();
  report.curvature = record.curvature_ratio;
  report.updates_held = environment_.updater->statistics().held();
  return report;
}

StepJudge::Answer StepJudge::AnswerTo(const StepRecord& record) {
  Answer answer{.what = policy_.Decide(record.spikes)};
  if (answer.what == SpikePolicy::Answer::kGoOn) return answer;
  const RunSpec& spec = *environment_.spec;
  answer.why = SpikeText(*policy_.ActedOn(record.spikes), spec);
  if (answer.what == SpikePolicy::Answer::kStop) {
    answer.why = absl::StrCat("run '", spec.run_id, "' stopped itself at step ", record.step, " after ",
                              policy_.rewinds(), " rewinds (spikes.max_rewinds): ", answer.why,
                              "; look at its data and learning rate, then rewind it and go on, or delete it");
  }
  return answer;
}

}  // namespace ballast
