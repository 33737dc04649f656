// Finds signs of a loss spike in what a run's steps measured, and scores its predictors against the loss spikes that
// came.
//
//   SpikeDetector detector(settings, thresholds);
//   for (const SpikeEvent& event : detector.Observe(step)) ...
//
// RMS and curvature are watched by layer. An event is a crossing of the limit from below; before the next event the
// value must fall under 9/10 of the limit, and ten steps must pass. The limit of curvature is 1; that of RMS is the
// layer's threshold and, where there is a margin, at least the margin times the largest of the layer's last 128 values,
// of which there must be 64: what is usual for a layer is no sign, however high. A loss spike is as in LossWatch. A
// gradient's norm is an outlier where it lies norm_sigmas standard deviations above the mean of the last 128, in each
// step for itself. A window gives no verdict before it is half full. Values that are not finite enter no window.
//
// Deterministic and without a clock: a copy goes on as the original would, which a rewind relies on.
// Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "server/stability/loss_watch.h"
#include "server/stability/running_max.h"
#include "server/stability/running_window.h"
#include "server/stability/spike_score.h"
#include "server/stability/spikes.h"

namespace ballast {

// A layer's largest value, and the tensor that has it.
struct LayerValue {
  std::optional<double> value = {};  // none: not measured, or nothing was updated
  uint32_t tensor = 0;
};

// What one closed step measured, or what an open step would measure if it were applied.
struct StepFindings {
  uint64_t step = 0;
  bool applied = true;                     // else RMS_t is what the update would have had, and is not learned from
  std::vector<LayerValue> rms = {};        // RMS_t by layer, of the tensors that are watched
  std::vector<LayerValue> curvature = {};  // by layer, as a multiple of the edge of stability
  std::optional<double> loss = {};
  std::optional<uint32_t> nonfinite_loss_rank = {};  // the first whose loss is not finite
  std::optional<double> grad_norm = {};
  uint64_t nonfinite_tensors = 0;
  uint32_t first_nonfinite = 0;  // where there are some
};

class SpikeDetector {
 public:
  // rms_thresholds: by layer.
  SpikeDetector(SpikeSettings settings, std::vector<double> rms_thresholds);

  // To be called for each step once, in order, also for steps that were not applied, but for those that were discarded.
  std::vector<SpikeEvent> Observe(const StepFindings& found);
  // Goes on from what `past` had seen, of this run, which may have had other layers behind those that both have, but
  // keeps its own scores: what was predicted was predicted.
  void GoBackTo(const SpikeDetector& past);
  // What is high at a step that may still be dropped, whether or not it was high before. Changes nothing.
  std::vector<SpikeEvent> Foresee(const StepFindings& found) const;

  const SpikeScore& score(SpikeKind predictor) const { return state_.scores[static_cast<size_t>(predictor)]; }

  // A value that is watched for crossings.
  struct Watch {
    bool high = false;
    uint64_t last_event = 0;  // step; 0: none
    RunningMax recent = {};   // of RMS
  };
  // All that it has learned.
  struct State {
    std::vector<Watch> rms = {}, curvature = {};  // by layer
    LossWatch::State loss = {};
    RunningWindow norms = {};
    std::array<SpikeScore, kPredictors> scores = {};
  };
  State state() const;
  // Goes on from a checkpoint's, with its scores. As many layers as there are.
  void GoOnFrom(State state);

 private:
  // By layer; infinite: nothing can be said yet.
  std::vector<double> RmsLimits() const;
  std::vector<SpikeEvent> FindPredictors(const StepFindings& found, const std::vector<double>& rms_limits) const;
  bool warm(uint64_t step) const { return step > settings_.warmup_steps; }
  void Learn(const StepFindings& found);
  void Score(const std::vector<SpikeEvent>& events, uint64_t step);

  SpikeSettings settings_;
  std::vector<double> rms_thresholds_, edges_;  // by layer
  LossWatch loss_;
  State state_;  // but for `loss`, which loss_ has
};

}  // namespace ballast
