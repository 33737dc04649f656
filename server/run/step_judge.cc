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

void StepJudge::Judge(const effect::Judge& judge) {
  judged_ = judge.slabs;
  judging_ = judge.step;
  if (!JudgesGradients(*environment_.spec)) return Pronounce({.step = judge.step});
  for (uint32_t i = 0; i < judge.slabs.size(); ++i) {
    if (!judge.slabs[i]) continue;
    ++awaited_;
    environment_.updater->Measure(judge.step, i, *judge.slabs[i], [this] { OnAnswer(); });
  }
}

// The last answer that is awaited may be to a step that a change of world has closed.
void StepJudge::OnAnswer() {
  --awaited_;
  if (awaited_ == 0 && environment_.machine->step_open() && environment_.machine->step() == judging_) {
    environment_.updater->probed() ? Pronounce(verdict_) : JudgeMeasured();
  }
  environment_.settle();
}

// A step that is to be applied may first be tried, for what it would do.
void StepJudge::JudgeMeasured() {
  const RunSpec& spec = *environment_.spec;
  const GradientFindings found = environment_.updater->statistics().Findings();
  verdict_ = JudgeStep(spec, judging_, environment_.settings->loss_scale, found);
  const bool applies = verdict_.outcome == Outcome::kApplied;
  if (applies) environment_.settings->clip = ClipCoefficient(spec, found.norm);
  if (!applies || spec.spikes.action != SpikeAction::kSkip) return Pronounce(verdict_);
  for (uint32_t i = 0; i < judged_.size(); ++i) {
    if (judged_[i]) DryUpdate(i, *judged_[i]);
  }
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
          .grad_norm = gradients.norm,
          .nonfinite_tensors = gradients.nonfinite_tensors,
          .first_nonfinite = gradients.first_nonfinite};
}

void StepJudge::Observe(StepRecord* record) {
  StepFindings found = FindingsOf(record->step);
  // Gradients that a trainer scales up until they overflow are no finding; a step that nobody measured has no norm.
  if (record->reason == "overflow") found.nonfinite_tensors = 0;
  if (record->outcome == Outcome::kAborted) found.grad_norm.reset();
  record->spikes = detector_.Observe(found);
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
