// How a staged step is judged: its gradients are measured, then applied, skipped, or the run is stopped.
#include <utility>

#include "server/base/clock.h"
#include "server/run/step_runner.h"

namespace ballast {

void StepRunner::Do(const effect::Judge& e) {
  TakeEndValues();
  judged_ = e.slabs;
  judging_ = e.step;
  if (!JudgesGradients(*environment_.spec)) return Pronounce({.step = e.step});
  for (const auto& slab : e.slabs) measuring_ += slab ? 1 : 0;
  updating_ += measuring_;
  for (uint32_t i = 0; i < e.slabs.size(); ++i) {
    if (!e.slabs[i]) continue;
    environment_.store->Measure(i, ValuesOf(e.step, i, *e.slabs[i]),
                                [this, step = e.step, i](const TaskResult& result) { OnMeasured(step, i, result); });
  }
}

// All ranks gave the same: the machine has seen to that.
void StepRunner::TakeEndValues() {
  for (const message::GroupValue& v : end_values_) hyper_[v.group][v.hyper] = v.value;
}

void StepRunner::OnMeasured(uint64_t step, uint32_t tensor, const TaskResult& result) {
  --updating_;
  --measuring_;
  if (machine_.step_open() && machine_.step() == step) {  // a change of world may have closed it
    statistics_.AddMeasure(tensor, result.statistics);
    clock_.update_s += result.seconds;
  }
  JudgeOn();
  Settle();
}

// The last answer that is awaited may be to a step that a change of world has closed.
void StepRunner::JudgeOn() {
  if (measuring_ > 0 || !machine_.step_open() || machine_.step() != judging_) return;
  probed_ ? Pronounce(verdict_) : JudgeMeasured();
}

// A step that is to be applied may first be tried, for what it would do.
void StepRunner::JudgeMeasured() {
  const GradientFindings found = statistics_.Findings();
  verdict_ = JudgeStep(*environment_.spec, judging_, loss_scale_, found);
  const bool applies = verdict_.outcome == Outcome::kApplied;
  if (applies) clip_ = ClipCoefficient(*environment_.spec, found.norm);
  if (!applies || environment_.spec->spikes.action != SpikeAction::kSkip) return Pronounce(verdict_);
  probed_ = true;
  for (uint32_t i = 0; i < judged_.size(); ++i) {
    if (judged_[i]) Probe(judging_, i, *judged_[i]);
  }
}

void StepRunner::Probe(uint64_t step, uint32_t tensor, Slab slab) {
  const ParameterStore::UpdateValues values = ValuesOf(step, tensor, slab);
  ++measuring_;
  ++updating_;
  environment_.store->Probe(tensor, values, [this, step, tensor](const TaskResult& result) {
    if (machine_.step_open() && machine_.step() == step) statistics_.AddProbe(tensor, result.statistics);
    OnProbed();
  });
  if (!ProbesCurvature(*environment_.spec, environment_.spec->tensors[tensor])) return;
  ++measuring_;
  ++updating_;
  ProbeCurvature(tensor, values, [this] { OnProbed(); });
}

void StepRunner::OnProbed() {
  --updating_;
  --measuring_;
  JudgeOn();
  Settle();
}

void StepRunner::Pronounce(event::Verdict verdict) {
  judging_ = 0;
  if (probed_) JudgeSpikes(&verdict);
  if (verdict.outcome == Outcome::kAborted) StopIf(verdict.detail);
  // A step that is not applied tells nobody that its gradient was clipped.
  if (verdict.outcome != Outcome::kApplied) clip_ = 1;
  Execute(machine_.Handle(verdict, MonotonicSeconds())).IgnoreError();  // never refused
}

void StepRunner::StopIf(std::string why) {
  if (why.empty() || !stopped_.empty()) return;
  stopped_ = std::move(why);
  environment_.board->Write([this](RunStatus& s) { s.failure = stopped_; });
}

}  // namespace ballast
