// One tensor's update: with what values, and what is measured of its gradient before.
#include <cmath>
#include <utility>

#include "server/base/clock.h"
#include "server/run/step_runner.h"

namespace ballast {

ParameterStore::UpdateValues StepRunner::ValuesOf(uint64_t step, uint32_t tensor, Slab slab) {
  const RunSpec& spec = *environment_.spec;
  const TensorSpec& t = spec.tensors[tensor];
  const bool full = step == 1 || step % spec.stats_every == 0;
  return {.step = step,
          .gradient_divisor = loss_scale_ * (spec.mean ? ranks_in_step() : 1),
          .clip = clip_,
          .statistics = full ? kernels::StatisticsLevel::kFull : kernels::StatisticsLevel::kCore,
          .hyper = hyper_[t.group],
          .gradient = SlabAt(tensor, slab),
          .gradient_format = SlabFormat(spec, t),
          .measured = JudgesGradients(spec)};
}

void StepRunner::Do(const effect::Update& e) {
  ++updating_;
  environment_.snapshots->BeforeUpdate(e.tensor);
  ParameterStore::UpdateValues values = ValuesOf(e.step, e.tensor, e.slab);
  if (!tensor_clip_) return Submit(e, values);
  if (values.measured) {
    values.clip = tensor_clip_->Next(e.tensor, statistics_.GradientNorm(e.tensor));
    return Submit(e, values);
  }
  // The step may be closed, and another one's values be in place, when the norm is known.
  std::vector<double> hyper = hyper_[environment_.spec->tensors[e.tensor].group];
  environment_.store->Measure(
      e.tensor, values,
      [this, e, values, hyper = std::move(hyper), rewinds = rewinds_](const TaskResult& result) mutable {
        if (rewinds != rewinds_) return OnUpdated(e, 1, rewinds, result);  // its step is undone: no update follows
        if (machine_.step_open() && machine_.step() == e.step) statistics_.AddMeasure(e.tensor, result.statistics);
        values.hyper = hyper;
        values.measured = true;
        values.clip = tensor_clip_->Next(e.tensor, std::sqrt(result.statistics.grad_sq));
        Submit(e, values);
      });
}

void StepRunner::Submit(const effect::Update& e, ParameterStore::UpdateValues values) {
  const TensorSpec& t = environment_.spec->tensors[e.tensor];
  if (ProbesCurvature(*environment_.spec, t)) {
    if (!probed_) ProbeCurvature(e.tensor, values, [] {});
    values.measured = true;
    last_lr_[e.tensor] = HyperOf(environment_.spec->groups[t.group], values.hyper, "lr").value_or(0);
  }
  environment_.store->Update(e.tensor, values,
                             [this, e, clip = values.clip, rewinds = rewinds_](const TaskResult& result) {
                               OnUpdated(e, clip, rewinds, result);
                             });
}

// lr kappa (1 - b1) / (2 (1 + b1)), with the learning rate of this step: 1 is the edge of stability of gradient descent
// with momentum (arXiv 2207.14484). kernels/NUMERICS.md, "Curvature".
void StepRunner::ProbeCurvature(uint32_t tensor, const ParameterStore::UpdateValues& values,
                                std::function<void()> done) {
  const GroupSpec& group = environment_.spec->groups[environment_.spec->tensors[tensor].group];
  const double lr = HyperOf(group, values.hyper, "lr").value_or(0);
  const double beta1 = HyperOf(group, values.hyper, "beta1").value_or(0);
  const double scale = lr / last_lr_[tensor] * (1 - beta1) / (2 * (1 + beta1)) / statistics_.HeldTo(tensor);
  environment_.store->Curvature(
      tensor, values, [this, step = values.step, tensor, scale, done = std::move(done)](const TaskResult& result) {
        const kernels::Curvature& c = result.curvature;
        const double ratio = -c.u_dg / c.u_pu * scale;
        const bool open = machine_.step_open() && machine_.step() == step;
        if (open && c.nonfinite == 0 && std::isfinite(ratio)) statistics_.AddCurvature(tensor, ratio);
        done();
      });
}

void StepRunner::OnUpdated(const effect::Update& e, float clip, uint64_t rewinds, const TaskResult& result) {
  --updating_;
  const bool undone = rewinds != rewinds_;
  if (!undone && machine_.step_open() && machine_.step() == e.step) {
    statistics_.Add(e.tensor, result.statistics, tensor_clip_ ? clip : 1);
    clock_.update_s += result.seconds;
    clock_.last_update_s = MonotonicSeconds();
  }
  if (!undone && !environment_.spec->staged && result.statistics.nonfinite > 0) {
    StopIf(StopReason(*environment_.spec, e.step, {.nonfinite_tensors = 1, .first_nonfinite = e.tensor}));
  }
  Execute(machine_.Handle(event::TensorApplied{e.step, e.tensor, e.slab}, MonotonicSeconds()))
      .IgnoreError();  // never refused
  Settle();
}

}  // namespace ballast
