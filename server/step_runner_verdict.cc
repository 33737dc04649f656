// How a staged step is judged: its gradients are measured, then applied, skipped, or the run is stopped.
#include <utility>

#include "server/clock.h"
#include "server/step_runner.h"

namespace ballast {

void StepRunner::Do(const effect::Judge& e) {
  TakeEndValues();
  if (!JudgesGradients(*environment_.spec)) return Pronounce(e.step);
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
    if (measuring_ == 0) Pronounce(step);
  }
  Settle();
}

void StepRunner::Pronounce(uint64_t step) {
  event::Verdict verdict{.step = step};
  if (JudgesGradients(*environment_.spec)) {
    const GradientFindings found = statistics_.Findings();
    verdict = JudgeStep(*environment_.spec, step, loss_scale_, found);
    if (verdict.outcome == Outcome::kApplied) clip_ = ClipCoefficient(*environment_.spec, found.norm);
    if (verdict.outcome == Outcome::kApplied) JudgeSpikes(&verdict);
    if (verdict.outcome == Outcome::kAborted) StopIf(verdict.detail);
  }
  Execute(machine_.Handle(verdict, MonotonicSeconds())).IgnoreError();  // never refused
}

void StepRunner::StopIf(std::string why) {
  if (why.empty() || !stopped_.empty()) return;
  stopped_ = std::move(why);
  environment_.board->Write([this](RunStatus& s) { s.failure = stopped_; });
}

}  // namespace ballast
