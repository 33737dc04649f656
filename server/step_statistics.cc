#include "server/step_statistics.h"

#include <algorithm>
#include <cmath>

namespace ballast {
namespace {

double RmsOf(const kernels::Statistics& s, uint64_t elements) {
  const double rms = std::sqrt(s.rms_sq / static_cast<double>(elements));
  return std::isfinite(rms) ? rms : 0;
}

bool HasRms(const RunSpec& spec, uint32_t tensor) { return spec.groups[spec.tensors[tensor].group].kernel->has_rms; }

}  // namespace

StepStatistics::StepStatistics(const RunSpec* spec, const LayerGroups* layers)
    : spec_(spec),
      layers_(layers),
      tensors_(spec->tensors.size()),
      updated_(spec->tensors.size()),
      measured_(spec->tensors.size()) {}

void StepStatistics::Begin() {
  updated_.assign(updated_.size(), false);
  measured_.assign(measured_.size(), false);
}

void StepStatistics::AddMeasure(uint32_t tensor, const kernels::Statistics& statistics) {
  tensors_[tensor] = statistics;
  measured_[tensor] = true;
}

void StepStatistics::Add(uint32_t tensor, const kernels::Statistics& statistics) {
  const kernels::Statistics measure = tensors_[tensor];
  tensors_[tensor] = statistics;
  updated_[tensor] = true;
  if (!measured_[tensor]) return;
  tensors_[tensor].grad_sq = measure.grad_sq;
  tensors_[tensor].grad_absmax = measure.grad_absmax;
  tensors_[tensor].nonfinite = measure.nonfinite;
}

GradientFindings StepStatistics::Findings() const {
  GradientFindings found;
  double grad_sq = 0;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!updated_[i] && !measured_[i]) continue;
    grad_sq += tensors_[i].grad_sq;
    if (tensors_[i].nonfinite == 0) continue;
    if (found.nonfinite_tensors++ == 0) found.first_nonfinite = i;
  }
  found.norm = std::sqrt(grad_sq);
  return found;
}

void StepStatistics::Complete(ClosedStep* step) const {
  const GradientFindings found = Findings();
  step->grad_norm = found.norm;
  step->nonfinite_tensors = found.nonfinite_tensors;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (updated_[i]) step->rejected_blocks += tensors_[i].rejected;
  }
}

std::vector<StepStatistics::Sums> StepStatistics::SumLayers() const {
  std::vector<Sums> layers(layers_->names().size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    Sums& layer = layers[layers_->group(i)];
    layer.has_rms |= HasRms(*spec_, i);
    if (!updated_[i]) continue;
    const kernels::Statistics& t = tensors_[i];
    layer.any = true;
    layer.full &= t.full;
    layer.grad_sq += t.grad_sq;
    layer.update_sq += t.update_sq;
    layer.weight_sq += t.weight_sq;
    layer.stored_dot += t.stored_dot;
    layer.hi_dot += t.hi_dot;
    layer.unchanged += t.unchanged;
    layer.hi_unchanged += t.hi_unchanged;
    layer.elements += spec_->tensors[i].elements;
    if (HasRms(*spec_, i)) layer.rms_max = std::max(layer.rms_max, RmsOf(t, spec_->tensors[i].elements));
  }
  return layers;
}

StepReport::Layer StepStatistics::ToLayer(const Sums& sums) {
  StepReport::Layer layer;
  if (sums.has_rms) layer.rms_ratio = sums.rms_max;
  layer.gradient_norm = std::sqrt(sums.grad_sq);
  if (!sums.any || !sums.full) return layer;
  if (sums.weight_sq > 0) layer.update_to_weight_ratio = std::sqrt(sums.update_sq / sums.weight_sq);
  // (d . dhat)/|d| over |d|; nothing was lost where nothing was wanted.
  const auto quality = [&](double dot) { return sums.update_sq > 0 ? dot / sums.update_sq : 1; };
  const auto part = [&](uint64_t count) { return static_cast<double>(count) / static_cast<double>(sums.elements); };
  layer.edq_ratio = quality(sums.stored_dot);
  layer.unchanged_ratio = part(sums.unchanged);
  // The first component by itself differs only where a weight has a second one.
  if (sums.hi_dot != sums.stored_dot || sums.hi_unchanged != sums.unchanged) {
    layer.hi_edq_ratio = quality(sums.hi_dot);
    layer.hi_unchanged_ratio = part(sums.hi_unchanged);
  }
  return layer;
}

void StepStatistics::Complete(StepReport* report) const {
  ClosedStep closed;
  Complete(&closed);
  report->grad_norm = closed.grad_norm;
  report->nonfinite_tensors = closed.nonfinite_tensors;
  report->rejected_blocks = closed.rejected_blocks;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (updated_[i] && HasRms(*spec_, i)) {
      report->tensor_rms.push_back(RmsOf(tensors_[i], spec_->tensors[i].elements));
    }
  }
  for (const Sums& sums : SumLayers()) report->layers.push_back(ToLayer(sums));
}

}  // namespace ballast
