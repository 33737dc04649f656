#include "server/stability/spike_detector.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ballast {
namespace {

constexpr uint64_t kMergeSteps = 10;  // events closer than this are one
constexpr double kRearm = 0.9;        // of the threshold, under which a value counts as low again
constexpr double kEdge = 1;           // of stability, which curvature is told as a multiple of

bool Merged(uint64_t step, uint64_t last) { return last != 0 && step - last < kMergeSteps; }

// How high a value of the series may be; none while too little of it is known.
std::optional<double> Limit(const RunningWindow& window, double sigmas) {
  if (!window.half_full()) return std::nullopt;
  return window.mean() + sigmas * window.deviation();
}

// The layers whose value is at its threshold.
void AddHigh(SpikeKind kind, const std::vector<LayerValue>& values, const std::vector<double>& thresholds,
             std::vector<SpikeEvent>* events) {
  for (uint32_t layer = 0; layer < std::min(values.size(), thresholds.size()); ++layer) {
    const LayerValue& found = values[layer];
    if (!found.value || !(*found.value >= thresholds[layer])) continue;  // nor a NaN
    events->push_back(
        {.kind = kind, .layer = layer, .tensor = found.tensor, .value = *found.value, .threshold = thresholds[layer]});
  }
}

bool Any(const std::vector<SpikeEvent>& events, SpikeKind kind) {
  return std::any_of(events.begin(), events.end(), [&](const SpikeEvent& e) { return e.kind == kind; });
}

}  // namespace

SpikeDetector::SpikeDetector(SpikeSettings settings, std::vector<double> rms_thresholds)
    : settings_(std::move(settings)),
      rms_thresholds_(std::move(rms_thresholds)),
      edges_(rms_thresholds_.size(), kEdge),
      state_{.rms = std::vector<Watch>(rms_thresholds_.size()),
             .curvature = std::vector<Watch>(rms_thresholds_.size())} {}

std::vector<SpikeEvent> SpikeDetector::Foresee(const StepFindings& found) const {
  std::vector<SpikeEvent> events;
  if (found.nonfinite_tensors > 0) {
    events.push_back({.kind = SpikeKind::kNonfinite,
                      .tensor = found.first_nonfinite,
                      .value = static_cast<double>(found.nonfinite_tensors)});
  }
  const bool warm = found.step > settings_.warmup_steps;
  if (warm) {
    AddHigh(SpikeKind::kRms, found.rms, rms_thresholds_, &events);
    AddHigh(SpikeKind::kCurvature, found.curvature, edges_, &events);
    const std::optional<double> most_norm = Limit(state_.norms, settings_.norm_sigmas);
    if (most_norm && found.grad_norm && *found.grad_norm > *most_norm) {
      events.push_back({.kind = SpikeKind::kGradientNorm, .value = *found.grad_norm, .threshold = *most_norm});
    }
  }
  const std::optional<double> most_loss = Limit(state_.losses, settings_.loss_sigmas);
  if (found.loss && !std::isfinite(*found.loss)) {
    events.push_back({.kind = SpikeKind::kLoss, .value = *found.loss});
  } else if (warm && found.loss && most_loss && *found.loss > *most_loss) {
    events.push_back({.kind = SpikeKind::kLoss, .value = *found.loss, .threshold = *most_loss});
  }
  return events;
}

void SpikeDetector::GoBackTo(const SpikeDetector& past) {
  state_.rms.assign(past.state_.rms.begin(), past.state_.rms.end());
  state_.curvature.assign(past.state_.curvature.begin(), past.state_.curvature.end());
  state_.rms.resize(rms_thresholds_.size());
  state_.curvature.resize(edges_.size());
  state_.losses = past.state_.losses;
  state_.norms = past.state_.norms;
  state_.last_high_loss = past.state_.last_high_loss;
}

std::vector<SpikeEvent> SpikeDetector::Observe(const StepFindings& found) {
  std::vector<SpikeEvent> events = Foresee(found);
  // What is high was perhaps so before, or a moment ago.
  std::erase_if(events, [&](const SpikeEvent& e) {
    if (e.kind == SpikeKind::kRms) return !Crosses(&state_.rms[*e.layer], found.step);
    if (e.kind == SpikeKind::kCurvature) return !Crosses(&state_.curvature[*e.layer], found.step);
    return e.kind == SpikeKind::kLoss && Merged(found.step, std::exchange(state_.last_high_loss, found.step));
  });
  Rearm(found.rms, rms_thresholds_, &state_.rms);
  Rearm(found.curvature, edges_, &state_.curvature);
  Learn(found);
  if (found.step > settings_.warmup_steps) {
    for (size_t i = 0; i < kPredictors; ++i) {
      state_.scores[i].Add(Any(events, static_cast<SpikeKind>(i)), Any(events, SpikeKind::kLoss));
    }
  }
  return events;
}

bool SpikeDetector::Crosses(Watch* watch, uint64_t step) {
  if (std::exchange(watch->high, true) || Merged(step, watch->last_event)) return false;
  watch->last_event = step;
  return true;
}

void SpikeDetector::Rearm(const std::vector<LayerValue>& values, const std::vector<double>& thresholds,
                          std::vector<Watch>* watches) {
  for (size_t layer = 0; layer < std::min(values.size(), watches->size()); ++layer) {
    if (values[layer].value && *values[layer].value < kRearm * thresholds[layer]) (*watches)[layer].high = false;
  }
}

void SpikeDetector::Learn(const StepFindings& found) {
  if (found.loss && std::isfinite(*found.loss)) state_.losses.Add(*found.loss);
  if (!found.grad_norm || !std::isfinite(*found.grad_norm)) return;
  // One outlier must not hide the next: it enters as no more than the limit.
  state_.norms.Add(std::min(*found.grad_norm, Limit(state_.norms, settings_.norm_sigmas).value_or(*found.grad_norm)));
}

}  // namespace ballast
