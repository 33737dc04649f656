#include "server/run/step_statistics.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace ballast {
namespace {

double RmsOf(const kernels::Statistics& s, uint64_t elements) {
  const double rms = std::sqrt(s.rms_sq / static_cast<double>(elements));
  return std::isfinite(rms) ? rms : 0;
}

bool HasRms(const RunSpec& spec, uint32_t tensor) { return spec.groups[spec.tensors[tensor].group].kernel->has_rms; }

// Of a layer without a tensor that is watched all are shown.
std::vector<bool> ShownTensors(const RunSpec& spec, const LayerGroups& layers) {
  std::vector<bool> watched(layers.names().size()), shown;
  for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
    if (WatchesRms(spec, spec.tensors[i])) watched[layers.group(i)] = true;
  }
  for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
    shown.push_back(HasRms(spec, i) && (!watched[layers.group(i)] || WatchesRms(spec, spec.tensors[i])));
  }
  return shown;
}

}  // namespace

StepStatistics::StepStatistics(const RunSpec* spec, const LayerGroups* layers)
    : spec_(spec),
      layers_(layers),
      tensors_(spec->tensors.size()),
      updated_(spec->tensors.size()),
      measured_(spec->tensors.size()),
      probed_(spec->tensors.size()),
      shows_rms_(ShownTensors(*spec, *layers)),
      curvature_(spec->tensors.size()),
      held_to_(spec->tensors.size(), 1) {}

void StepStatistics::Begin() {
  updated_.assign(updated_.size(), false);
  measured_.assign(measured_.size(), false);
  probed_.assign(probed_.size(), false);
  curvature_.assign(curvature_.size(), std::nullopt);
  held_ = 0;
}

void StepStatistics::AddMeasure(uint32_t tensor, const kernels::Statistics& statistics) {
  tensors_[tensor] = statistics;
  measured_[tensor] = true;
}

void StepStatistics::Take(uint32_t tensor, const kernels::Statistics& statistics) {
  const kernels::Statistics measure = tensors_[tensor];
  tensors_[tensor] = statistics;
  if (!measured_[tensor]) return;
  tensors_[tensor].grad_sq = measure.grad_sq;
  tensors_[tensor].grad_absmax = measure.grad_absmax;
  tensors_[tensor].nonfinite = measure.nonfinite;
}

void StepStatistics::AddProbe(uint32_t tensor, const kernels::Statistics& statistics) {
  Take(tensor, statistics);
  probed_[tensor] = true;
}

void StepStatistics::Add(uint32_t tensor, const kernels::Statistics& statistics, float clip) {
  Take(tensor, statistics);
  updated_[tensor] = true;
  // Which holds its update to an RMS_t of 1.
  const bool holds = spec_->groups[spec_->tensors[tensor].group].kernel->finish != nullptr;
  held_to_[tensor] = holds ? 1 / std::max(1.0, RmsOf(statistics, spec_->tensors[tensor].elements)) : 1;
  held_ += held_to_[tensor] < 1 || clip < 1 ? 1 : 0;
}

GradientFindings StepStatistics::Findings() const {
  GradientFindings found;
  double grad_sq = 0;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!updated_[i] && !measured_[i]) continue;
    grad_sq += tensors_[i].grad_sq;
    if (tensors_[i].nonfinite == 0) continue;
    if (found.nonfinite_tensors++ > 0) continue;
    found.first_nonfinite = i;
    found.first_name = spec_->tensors[i].name;
  }
  found.norm = std::sqrt(grad_sq);
  return found;
}

std::vector<double> StepStatistics::GradientSquares() const {
  std::vector<double> squares(tensors_.size(), std::nan(""));
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (updated_[i] || measured_[i]) squares[i] = tensors_[i].grad_sq;
  }
  return squares;
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
    if (!shows_rms_[i]) continue;
    layer.rms_max = std::max(layer.rms_max, RmsOf(t, spec_->tensors[i].elements));
  }
  return layers;
}

std::vector<TensorStatus> StepStatistics::First(size_t count) const {
  std::vector<TensorStatus> tensors;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const kernels::Statistics& s = tensors_[i];
    if (!updated_[i]) continue;
    tensors.push_back({.tensor = i,
                       .gradient_norm = std::sqrt(s.grad_sq),
                       .gradient_absmax = s.grad_absmax,
                       .update_norm = std::sqrt(s.update_sq),
                       .nonfinite = s.nonfinite});
    if (HasRms(*spec_, i)) tensors.back().rms_ratio = RmsOf(s, spec_->tensors[i].elements);
  }
  const auto first = [](const TensorStatus& a, const TensorStatus& b) {
    const auto key = [](const TensorStatus& t) {
      return std::tuple(t.nonfinite > 0, t.rms_ratio.value_or(0), t.gradient_norm);
    };
    return key(a) > key(b);
  };
  const size_t shown = std::min(count, tensors.size());
  std::partial_sort(tensors.begin(), tensors.begin() + static_cast<ptrdiff_t>(shown), tensors.end(), first);
  tensors.resize(shown);
  return tensors;
}

template <typename Value>
std::vector<LayerValue> StepStatistics::Largest(Value value) const {
  std::vector<LayerValue> layers(layers_->names().size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const std::optional<double> found = value(i);
    LayerValue& layer = layers[layers_->group(i)];
    if (found && !(layer.value >= found)) layer = {.value = found, .tensor = i};
  }
  return layers;
}

std::vector<LayerValue> StepStatistics::RmsByLayer() const {
  return Largest([this](uint32_t i) -> std::optional<double> {
    if (!WatchesRms(*spec_, spec_->tensors[i]) || !(updated_[i] || probed_[i])) return std::nullopt;
    return RmsOf(tensors_[i], spec_->tensors[i].elements);
  });
}

std::vector<LayerValue> StepStatistics::CurvatureByLayer() const {
  return Largest([this](uint32_t i) { return curvature_[i]; });
}

void StepStatistics::AddTo(const Sums& layer, Sums* whole) {
  if (!layer.any) return;
  whole->any = true;
  whole->full &= layer.full;
  whole->has_rms |= layer.has_rms;
  whole->rms_max = std::max(whole->rms_max, layer.rms_max);
  for (const auto sum : {&Sums::grad_sq, &Sums::update_sq, &Sums::weight_sq, &Sums::stored_dot, &Sums::hi_dot}) {
    whole->*sum += layer.*sum;
  }
  for (const auto count : {&Sums::unchanged, &Sums::hi_unchanged, &Sums::elements}) whole->*count += layer.*count;
}

StepRecord::Layer StepStatistics::ToLayer(const Sums& sums) {
  StepRecord::Layer layer;
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

void StepStatistics::Complete(StepRecord* record) const {
  const GradientFindings found = Findings();
  record->grad_norm = found.norm;
  record->nonfinite_tensors = found.nonfinite_tensors;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!updated_[i]) continue;
    record->rejected_blocks += tensors_[i].rejected;
    record->rejected_tensors += tensors_[i].rejected > 0 ? 1 : 0;
    if (HasRms(*spec_, i)) record->tensor_rms.push_back(RmsOf(tensors_[i], spec_->tensors[i].elements));
  }
  Sums sum;
  for (const Sums& layer : SumLayers()) {
    record->layers.push_back(ToLayer(layer));
    AddTo(layer, &sum);
  }
  const StepRecord::Layer whole = ToLayer(sum);
  record->edq_ratio = whole.edq_ratio;
  record->unchanged_ratio = whole.unchanged_ratio;
}

}  // namespace ballast
