// What a step tells of loss spikes, and what the run does about it.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/run/step_runner.h"
#include "server/spec/spike_text.h"

namespace ballast {
namespace {

std::optional<double> Highest(const std::vector<LayerValue>& layers) {
  std::optional<double> highest;
  for (const LayerValue& layer : layers) highest = std::max(highest, layer.value);  // none is less than any
  return highest;
}

}  // namespace

StepFindings StepRunner::FindingsOf(uint64_t step) const {
  const GradientFindings gradients = statistics_.Findings();
  return {.step = step,
          .rms = statistics_.RmsByLayer(),
          .curvature = statistics_.CurvatureByLayer(),
          .loss = Loss(),
          .grad_norm = gradients.norm,
          .nonfinite_tensors = gradients.nonfinite_tensors,
          .first_nonfinite = gradients.first_nonfinite};
}

void StepRunner::JudgeSpikes(event::Verdict* verdict) {
  const std::vector<SpikeEvent> foreseen = detector_.Foresee(FindingsOf(verdict->step));
  if (!policy_.Skips(foreseen)) return;
  verdict->outcome = Outcome::kSkipped;
  verdict->reason = "spike";
  verdict->detail = SpikeText(*policy_.ActedOn(foreseen), *environment_.spec);
}

StepFindings StepRunner::FindSpikes(ClosedStep* closed) {
  StepFindings found = FindingsOf(closed->step);
  // Gradients that a trainer scales up until they overflow are no finding; a step that nobody measured has no norm.
  if (closed->reason == "overflow") found.nonfinite_tensors = 0;
  if (closed->outcome == Outcome::kAborted) found.grad_norm.reset();
  closed->spikes = detector_.Observe(found);
  SpikeReport report{.events = closed->spikes};
  for (size_t i = 0; i < kPredictors; ++i) report.scores[i] = detector_.score(static_cast<SpikeKind>(i)).counts();
  report.curvature = Highest(found.curvature);
  report.updates_held = statistics_.held();
  environment_.metrics->OnSpikes(report);
  if (closed->reason == "spike") environment_.metrics->OnSpikeAction("skip");
  Answer(*closed);
  for (const SpikeEvent& event : closed->spikes) {
    Log(LogLevel::kWarn, "spike", "a loss spike, or what tells of one",
        {{"run_id", environment_.spec->run_id}, {"step", closed->step}, {"err", SpikeText(event, *environment_.spec)}});
  }
  return found;
}

void StepRunner::Answer(const ClosedStep& closed) {
  const RunSpec& spec = *environment_.spec;
  const SpikePolicy::Answer answer = policy_.Decide(closed.spikes);
  if (answer == SpikePolicy::Answer::kGoOn) return;
  const std::string why = SpikeText(*policy_.ActedOn(closed.spikes), spec);
  if (answer == SpikePolicy::Answer::kStop) {
    environment_.metrics->OnSpikeAction("stop");
    return StopIf(absl::StrCat("run '", spec.run_id, "' stopped itself at step ", closed.step, " after ",
                               policy_.rewinds(), " rewinds (spikes.max_rewinds): ", why,
                               "; look at its data and learning rate, then rewind it and go on, or delete it"));
  }
  RewindItself({.steps_back = spec.spikes.rewind_steps, .reason = "spike"}, why,
               [this] { environment_.metrics->OnSpikeAction("rewind"); });
}

void StepRunner::Remember(const StepReport& report, const StepFindings& found) {
  const ClosedStep& closed = results_.back();
  StepRecord record{.step = closed.step,
                    .outcome = closed.outcome,
                    .reason = closed.reason,
                    .detail = closed.detail,
                    .closed_at_s = UnixSeconds(),
                    .loss = report.loss,
                    .learning_rate = report.learning_rate,
                    .grad_norm = closed.grad_norm,
                    .clip_coefficient = closed.clip_coefficient,
                    .seconds = report.seconds,
                    .receive_seconds = report.receive_seconds,
                    .update_seconds = report.update_seconds,
                    .wait_seconds = clock_.wait_s,
                    .last_rank = clock_.last_rank,
                    .received_bytes = std::exchange(received_bytes_, 0),
                    .sent_bytes = std::exchange(sent_bytes_, 0),
                    .spikes = closed.spikes};
  record.curvature_ratio = Highest(found.curvature);
  record.edq_ratio = report.whole.edq_ratio;
  record.unchanged_ratio = report.whole.unchanged_ratio;
  for (const LayerValue& layer : found.rms) {
    record.layer_rms.push_back(layer.value ? static_cast<float>(*layer.value) : std::nanf(""));
  }
  environment_.history->Add(std::move(record));
}

void StepRunner::CountWait(uint32_t rank) {
  const double now_s = MonotonicSeconds();
  if (++clock_.ended == ranks_in_step() && ranks_in_step() > 1) {
    clock_.wait_s = now_s - clock_.last_end_s;
    environment_.metrics->OnWaitCaused(rank, clock_.wait_s);
  }
  clock_.last_end_s = now_s;
  clock_.last_rank = rank;
  environment_.metrics->OnRankSeen(rank);
}

}  // namespace ballast
