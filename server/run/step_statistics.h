// What a step's updates measured, tensor by tensor as they finish, summed in the order of the spec when the step
// closes: the same numbers whatever the order of the updates. Where gradients were measured before, theirs are the
// numbers of that pass: before clipping, and also of a step that is not applied.
//
// Strand-confined. Memory: one Statistics a tensor, from the constructor on.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "server/run/run_status.h"
#include "server/spec/layers.h"
#include "server/spec/run_spec.h"
#include "server/stability/spike_detector.h"
#include "server/step/step_record.h"
#include "server/step/step_verdict.h"

namespace ballast {

class StepStatistics {
 public:
  StepStatistics(const RunSpec* spec, const LayerGroups* layers);

  void Begin();
  void AddMeasure(uint32_t tensor, const kernels::Statistics& statistics);
  bool measured(uint32_t tensor) const { return measured_[tensor]; }
  // What the tensor's update would show, of a step that may still be dropped.
  void AddProbe(uint32_t tensor, const kernels::Statistics& statistics);
  // As a multiple of the edge of stability.
  void AddCurvature(uint32_t tensor, double ratio) { curvature_[tensor] = ratio; }
  // clip: of the tensor's gradient by itself, 1 where it was taken whole.
  void Add(uint32_t tensor, const kernels::Statistics& statistics, float clip = 1);

  // What the gradients measured so far show.
  GradientFindings Findings() const;
  // The sum of squares of each tensor's gradient, as Findings adds them up; NaN: it has none.
  std::vector<double> GradientSquares() const;

  // The tensors updated that are the first to look at: those with a gradient not finite, then by RMS_t, else by norm.
  std::vector<TensorStatus> First(size_t count) const;
  // RMS_t by layer, of the watched tensors that were updated or tried.
  std::vector<LayerValue> RmsByLayer() const;
  std::vector<LayerValue> CurvatureByLayer() const;
  // The L2 norm of the tensor's gradient, as it was measured.
  double GradientNorm(uint32_t tensor) const { return std::sqrt(tensors_[tensor].grad_sq); }
  // What the rule held the tensor's last update to: 1, but for StableAdamW 1 / max(1, RMS_t).
  double HeldTo(uint32_t tensor) const { return held_to_[tensor]; }
  // Tensors whose update was held to less than the whole.
  uint64_t held() const { return held_; }
  // Fills in grad_norm, nonfinite_tensors, rejected_blocks and _tensors, edq_ratio, unchanged_ratio, layers and
  // tensor_rms. Rules without a second moment have no RMS.
  void Complete(StepRecord* record) const;

 private:
  struct Sums {
    double grad_sq = 0, update_sq = 0, weight_sq = 0, stored_dot = 0, hi_dot = 0, rms_max = 0;
    uint64_t unchanged = 0, hi_unchanged = 0, elements = 0;
    bool any = false, full = true, has_rms = false;
  };
  // What was measured before stays.
  void Take(uint32_t tensor, const kernels::Statistics& statistics);
  static void AddTo(const Sums& layer, Sums* whole);
  static StepRecord::Layer ToLayer(const Sums& sums);
  std::vector<Sums> SumLayers() const;
  // Each layer's largest value, over its tensors that have one.
  template <typename Value>
  std::vector<LayerValue> Largest(Value value) const;

  const RunSpec* const spec_;
  const LayerGroups* const layers_;
  std::vector<kernels::Statistics> tensors_;
  std::vector<bool> updated_, measured_, probed_;
  const std::vector<bool> shows_rms_;  // in its layer's value
  std::vector<std::optional<double>> curvature_;
  std::vector<double> held_to_;
  uint64_t held_ = 0;
};

}  // namespace ballast
