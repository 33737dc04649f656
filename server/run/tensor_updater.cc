#include "server/run/tensor_updater.h"

#include <cmath>
#include <memory>
#include <utility>

#include "server/base/clock.h"

namespace ballast {

TensorUpdater::TensorUpdater(Environment environment)
    : environment_(std::move(environment)),
      statistics_(environment_.spec, environment_.layers),
      last_lr_(environment_.spec->tensors.size()) {
  const RunSpec& spec = *environment_.spec;
  if (spec.tensor_clip) tensor_clip_.emplace(*spec.tensor_clip, spec.tensors.size());
}

void TensorUpdater::Begin() {
  statistics_.Begin();
  probed_ = false;
  busy_s_ = last_update_s_ = 0;
}

void TensorUpdater::Remember(RunMemory* memory) const {
  memory->last_lr = last_lr_;
  if (tensor_clip_) memory->norms = tensor_clip_->averages();
}

void TensorUpdater::GoBackTo(const RunMemory& memory) {
  const size_t tensors = environment_.spec->tensors.size();
  ++rewinds_;
  if (tensor_clip_) {
    std::vector<TensorClip::Average> norms = memory.norms;
    norms.resize(tensors);  // of tensors that were added since nothing is known
    tensor_clip_->set_averages(std::move(norms));
  }
  last_lr_ = memory.last_lr;
  last_lr_.resize(tensors);
}

ParameterStore::UpdateValues TensorUpdater::ValuesOf(uint64_t step, uint32_t tensor, Slab slab) {
  const RunSpec& spec = *environment_.spec;
  const StepSettings& settings = *environment_.settings;
  const TensorSpec& t = spec.tensors[tensor];
  const bool full = step == 1 || step % spec.stats_every == 0;
  return {.step = step,
          .gradient_divisor = settings.loss_scale * (spec.mean ? settings.RanksOf(environment_.machine->world()) : 1),
          .clip = settings.clip,
          .statistics = full ? kernels::StatisticsLevel::kFull : kernels::StatisticsLevel::kCore,
          .hyper = settings.hyper[t.group],
          .gradient = environment_.pool->At(tensor, slab),
          .gradient_format = SlabFormat(spec, t),
          .measured = statistics_.measured(tensor),
          .summed_there = environment_.pool->on_device()};
}

void TensorUpdater::Sum(uint32_t tensor, SumTask sum, Done done) {
  ++under_way_;
  environment_.store->Sum(tensor, std::move(sum), [this, done = std::move(done)](const TaskResult&) mutable {
    --under_way_;
    done();
  });
}

void TensorUpdater::SumAndUpdate(const effect::Update& e, SumTask sum, Done summed) {
  const RunSpec& spec = *environment_.spec;
  if (environment_.log || tensor_clip_ || ProbesCurvature(spec, spec.tensors[e.tensor])) {
    Sum(e.tensor, std::move(sum), std::move(summed));
    return Update(e);
  }
  ++under_way_;
  auto sums = std::make_shared<GradientSums>();
  sums->push_back(std::move(sum));
  environment_.store->Update(
      e.tensor, ValuesOf(e.step, e.tensor, e.slab),
      [this, e, rewinds = rewinds_, summed = std::move(summed)](const TaskResult& result) mutable {
        summed();
        OnUpdated(e, 1, rewinds, result);
      },
      std::move(sums));
}

void TensorUpdater::Measure(uint64_t step, uint32_t tensor, Slab slab, Done done) {
  ++under_way_;
  environment_.store->Measure(tensor, ValuesOf(step, tensor, slab),
                              [this, step, tensor, done = std::move(done)](const TaskResult& result) mutable {
                                --under_way_;
                                if (IsOpen(step)) {  // a change of world may have closed it
                                  statistics_.AddMeasure(tensor, result.statistics);
                                  busy_s_ += result.seconds;
                                }
                                done();
                              });
}

void TensorUpdater::DryUpdate(uint64_t step, uint32_t tensor, Slab slab, Done done) {
  probed_ = true;
  ++under_way_;
  environment_.store->DryUpdate(tensor, ValuesOf(step, tensor, slab),
                                [this, step, tensor, done = std::move(done)](const TaskResult& result) mutable {
                                  --under_way_;
                                  if (IsOpen(step)) statistics_.AddProbe(tensor, result.statistics);
                                  done();
                                });
}

void TensorUpdater::ProbeCurvature(uint64_t step, uint32_t tensor, Slab slab, Done done) {
  ++under_way_;
  AskCurvature(tensor, ValuesOf(step, tensor, slab), [this, done = std::move(done)]() mutable {
    --under_way_;
    done();
  });
}

void TensorUpdater::Update(const effect::Update& e) {
  ++under_way_;
  ParameterStore::UpdateValues values = ValuesOf(e.step, e.tensor, e.slab);
  if (!tensor_clip_) return Submit(e, values);
  if (values.measured) {
    values.clip = tensor_clip_->Next(e.tensor, statistics_.GradientNorm(e.tensor));
    return Submit(e, values);
  }
  // The step may be closed, and another one's values be in place, when the norm is known.
  std::vector<double> hyper = environment_.settings->hyper[environment_.spec->tensors[e.tensor].group];
  environment_.store->Measure(
      e.tensor, values,
      [this, e, values, hyper = std::move(hyper), rewinds = rewinds_](const TaskResult& result) mutable {
        if (rewinds != rewinds_) return OnUpdated(e, 1, rewinds, result);  // its step is undone: no update follows
        if (IsOpen(e.step)) statistics_.AddMeasure(e.tensor, result.statistics);
        values.hyper = hyper;
        values.measured = true;
        values.clip = tensor_clip_->Next(e.tensor, std::sqrt(result.statistics.grad_sq));
        Submit(e, values);
      });
}

void TensorUpdater::Submit(const effect::Update& e, ParameterStore::UpdateValues values) {
  const TensorSpec& t = environment_.spec->tensors[e.tensor];
  if (ProbesCurvature(*environment_.spec, t)) {
    if (!probed_) AskCurvature(e.tensor, values, [] {});
    values.measured = true;
    last_lr_[e.tensor] = HyperOf(environment_.spec->groups[t.group], values.hyper, "lr").value_or(0);
  }
  if (!environment_.log) return SubmitLogged(e, values);
  // As in Update: what the values point to may be another step's by then. The sums must be made that are written down.
  std::vector<double> hyper(values.hyper.begin(), values.hyper.end());
  environment_.store->WhenSummed(
      e.tensor, [this, e, values, hyper = std::move(hyper), rewinds = rewinds_](const TaskResult&) mutable {
        Log(e, values, std::move(hyper), rewinds);
      });
}

void TensorUpdater::Log(const effect::Update& e, ParameterStore::UpdateValues values, std::vector<double> hyper,
                        uint64_t rewinds) {
  if (rewinds != rewinds_) return OnUpdated(e, 1, rewinds, {});  // its step is undone
  values.hyper = hyper;
  environment_.log(e.tensor, values, [this, e, values, hyper = std::move(hyper), rewinds]() mutable {
    if (rewinds != rewinds_) return OnUpdated(e, 1, rewinds, {});
    values.hyper = hyper;
    SubmitLogged(e, values);
  });
}

void TensorUpdater::SubmitLogged(const effect::Update& e, const ParameterStore::UpdateValues& values) {
  environment_.store->Update(e.tensor, values,
                             [this, e, clip = values.clip, rewinds = rewinds_](const TaskResult& result) {
                               OnUpdated(e, clip, rewinds, result);
                             });
}

// lr kappa (1 - b1) / (2 (1 + b1)), with the learning rate of this step: 1 is the edge of stability of gradient descent
// with momentum (arXiv 2207.14484). kernels/NUMERICS.md, "Curvature".
void TensorUpdater::AskCurvature(uint32_t tensor, const ParameterStore::UpdateValues& values, Done done) {
  const GroupSpec& group = environment_.spec->groups[environment_.spec->tensors[tensor].group];
  const double lr = HyperOf(group, values.hyper, "lr").value_or(0);
  const double beta1 = HyperOf(group, values.hyper, "beta1").value_or(0);
  const double scale = lr / last_lr_[tensor] * (1 - beta1) / (2 * (1 + beta1)) / statistics_.HeldTo(tensor);
  environment_.store->Curvature(
      tensor, values,
      [this, step = values.step, tensor, scale, done = std::move(done)](const TaskResult& result) mutable {
        const kernels::Curvature& c = result.curvature;
        const double ratio = -c.u_dg / c.u_pu * scale;
        if (IsOpen(step) && c.nonfinite == 0 && std::isfinite(ratio)) statistics_.AddCurvature(tensor, ratio);
        done();
      });
}

void TensorUpdater::OnUpdated(const effect::Update& e, float clip, uint64_t rewinds, const TaskResult& result) {
  --under_way_;
  const bool undone = rewinds != rewinds_;
  if (!undone && IsOpen(e.step)) {
    statistics_.Add(e.tensor, result.statistics, tensor_clip_ ? clip : 1);
    busy_s_ += result.seconds;
    last_update_s_ = MonotonicSeconds();
  }
  environment_.on_updated(e, undone ? nullptr : &result);
}

}  // namespace ballast
