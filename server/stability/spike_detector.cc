#include "server/stability/spike_detector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace ballast {
namespace {

constexpr uint64_t kMergeSteps = 10;  // events closer than this are one
constexpr double kRearm = 0.9;        // of the threshold, under which a value counts as low again
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kEdge = 1;  // of stability, which curvature is told as a multiple of

bool Merged(uint64_t step, uint64_t last) { return last != 0 && step - last < kMergeSteps; }

// How high a value of the series may be; none while too little of it is known.
std::optional<double> MostOf(const RunningWindow& window, double sigmas) {
  if (!window.half_full()) return std::nullopt;
  return window.mean() + sigmas * window.deviation();
}

// The layers whose value is at its limit.
void AddHigh(SpikeKind kind, const std::vector<LayerValue>& values, const std::vector<double>& limits,
             std::vector<SpikeEvent>* events) {
  for (uint32_t layer = 0; layer < std::min(values.size(), limits.size()); ++layer) {
    const LayerValue& found = values[layer];
    if (!found.value || !(*found.value >= limits[layer])) continue;  // nor a NaN
    events->push_back(
        {.kind = kind, .layer = layer, .tensor = found.tensor, .value = *found.value, .threshold = limits[layer]});
  }
}

bool Crosses(SpikeDetector::Watch* watch, uint64_t step) {
  if (std::exchange(watch->high, true) || Merged(step, watch->last_event)) return false;
  watch->last_event = step;
  return true;
}

void Rearm(const std::vector<LayerValue>& values, const std::vector<double>& limits,
           std::vector<SpikeDetector::Watch>* watches) {
  for (size_t layer = 0; layer < std::min(values.size(), watches->size()); ++layer) {
    if (values[layer].value && *values[layer].value < kRearm * limits[layer]) (*watches)[layer].high = false;
  }
}

SpikeEvent LossEvent(const LossWatch::Spike& spike, const StepFindings& found) {
  return {.kind = SpikeKind::kLoss,
          .rank = found.nonfinite_loss_rank,
          .value = spike.loss,
          .threshold = spike.limit,
          .since = spike.since};
}

}  // namespace

SpikeDetector::SpikeDetector(SpikeSettings settings, std::vector<double> rms_thresholds)
    : settings_(std::move(settings)),
      rms_thresholds_(std::move(rms_thresholds)),
      edges_(rms_thresholds_.size(), kEdge),
      loss_(settings_.loss_sigmas),
      state_{.rms = std::vector<Watch>(rms_thresholds_.size()),
             .curvature = std::vector<Watch>(rms_thresholds_.size())} {}

SpikeDetector::State SpikeDetector::state() const {
  State state = state_;
  state.loss = loss_.state();
  return state;
}

void SpikeDetector::GoOnFrom(State state) {
  loss_.GoOnFrom(std::move(state.loss));
  state_ = std::move(state);
}

void SpikeDetector::GoBackTo(const SpikeDetector& past) {
  state_.rms.assign(past.state_.rms.begin(), past.state_.rms.end());
  state_.curvature.assign(past.state_.curvature.begin(), past.state_.curvature.end());
  state_.rms.resize(rms_thresholds_.size());
  state_.curvature.resize(edges_.size());
  state_.norms = past.state_.norms;
  loss_.GoOnFrom(past.loss_.state());
}

std::vector<double> SpikeDetector::RmsLimits() const {
  std::vector<double> limits = rms_thresholds_;
  if (settings_.rms_margin == 0) return limits;
  for (size_t layer = 0; layer < limits.size(); ++layer) {
    const std::optional<double> recent = state_.rms[layer].recent.max();
    limits[layer] = recent ? std::max(limits[layer], settings_.rms_margin * *recent) : kNever;
  }
  return limits;
}

std::vector<SpikeEvent> SpikeDetector::FindPredictors(const StepFindings& found,
                                                      const std::vector<double>& rms_limits) const {
  std::vector<SpikeEvent> events;
  if (found.nonfinite_tensors > 0) {
    events.push_back({.kind = SpikeKind::kNonfinite,
                      .tensor = found.first_nonfinite,
                      .value = static_cast<double>(found.nonfinite_tensors)});
  }
  if (warm(found.step)) {
    AddHigh(SpikeKind::kRms, found.rms, rms_limits, &events);
    AddHigh(SpikeKind::kCurvature, found.curvature, edges_, &events);
    const std::optional<double> most_norm = MostOf(state_.norms, settings_.norm_sigmas);
    if (most_norm && found.grad_norm && *found.grad_norm > *most_norm) {
      events.push_back({.kind = SpikeKind::kGradientNorm, .value = *found.grad_norm, .threshold = *most_norm});
    }
  }
  for (SpikeEvent& event : events) event.since = loss_.spike_since();
  return events;
}

std::vector<SpikeEvent> SpikeDetector::Foresee(const StepFindings& found) const {
  std::vector<SpikeEvent> events = FindPredictors(found, RmsLimits());
  if (!found.loss) return events;
  if (const auto spike = loss_.Foresee(found.step, *found.loss, warm(found.step)))
    events.push_back(LossEvent(*spike, found));
  return events;
}

std::vector<SpikeEvent> SpikeDetector::Observe(const StepFindings& found) {
  const std::vector<double> rms_limits = RmsLimits();
  std::vector<SpikeEvent> events = FindPredictors(found, rms_limits);
  // What is high was perhaps so before, or a moment ago.
  std::erase_if(events, [&](const SpikeEvent& e) {
    if (e.kind == SpikeKind::kRms) return !Crosses(&state_.rms[*e.layer], found.step);
    return e.kind == SpikeKind::kCurvature && !Crosses(&state_.curvature[*e.layer], found.step);
  });
  Rearm(found.rms, rms_limits, &state_.rms);
  Rearm(found.curvature, edges_, &state_.curvature);
  Learn(found);
  if (found.loss) {
    const auto spike = loss_.Observe(found.step, *found.loss, warm(found.step));
    if (spike) events.push_back(LossEvent(*spike, found));
  }
  if (warm(found.step)) Score(events, found.step);
  return events;
}

void SpikeDetector::Score(const std::vector<SpikeEvent>& events, uint64_t step) {
  std::optional<uint32_t> spike_age;
  std::array<bool, kPredictors> foretell = {};
  for (const SpikeEvent& event : events) {
    const auto kind = static_cast<size_t>(event.kind);
    if (event.kind == SpikeKind::kLoss) spike_age = static_cast<uint32_t>(step - event.since);
    if (kind < kPredictors && event.since == 0) foretell[kind] = true;
  }
  for (size_t i = 0; i < kPredictors; ++i) state_.scores[i].Add(foretell[i], spike_age);
}

void SpikeDetector::Learn(const StepFindings& found) {
  for (size_t layer = 0; layer < std::min(found.rms.size(), state_.rms.size()); ++layer) {
    const std::optional<double> rms = found.rms[layer].value;
    if (found.applied && rms && std::isfinite(*rms)) state_.rms[layer].recent.Add(*rms);
  }
  if (!found.grad_norm || !std::isfinite(*found.grad_norm)) return;
  // One outlier must not hide the next: it enters as no more than the limit.
  state_.norms.Add(std::min(*found.grad_norm, MostOf(state_.norms, settings_.norm_sigmas).value_or(*found.grad_norm)));
}

}  // namespace ballast
