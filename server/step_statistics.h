// What a step's updates measured, tensor by tensor as they finish, summed in the order of the spec when the step
// closes: the same numbers whatever the order of the updates. Where gradients were measured before, theirs are the
// numbers of that pass: before clipping, and also of a step that is not applied.
//
// Strand-confined. Memory: one Statistics a tensor, from the constructor on.
#pragma once

#include <cstdint>
#include <vector>

#include "server/layers.h"
#include "server/metrics.h"
#include "server/rank_stream.h"
#include "server/run_spec.h"
#include "server/run_status.h"
#include "server/spike_detector.h"
#include "server/step_verdict.h"

namespace ballast {

class StepStatistics {
 public:
  StepStatistics(const RunSpec* spec, const LayerGroups* layers);

  void Begin();
  void AddMeasure(uint32_t tensor, const kernels::Statistics& statistics);
  void Add(uint32_t tensor, const kernels::Statistics& statistics);

  // Of what was measured so far.
  GradientFindings Findings() const;

  // Fills in grad_norm, nonfinite_tensors and rejected_blocks.
  void Complete(ClosedStep* step) const;
  // Of the tensors updated the first to look at: those with a gradient that is not finite, then by RMS_t, else by norm.
  std::vector<TensorStatus> First(size_t count) const;
  // Of all layers together.
  StepReport::Layer Whole() const;
  // RMS_t by layer, of what was updated.
  std::vector<LayerValue> RmsByLayer() const;
  // Fills in layers, tensor_rms and what Complete fills in. Rules without a second moment have no RMS.
  void Complete(StepReport* report) const;

 private:
  struct Sums {
    double grad_sq = 0, update_sq = 0, weight_sq = 0, stored_dot = 0, hi_dot = 0, rms_max = 0;
    uint64_t unchanged = 0, hi_unchanged = 0, elements = 0;
    uint32_t rms_tensor = 0;  // that has rms_max
    bool any = false, full = true, has_rms = false;
  };
  static void AddTo(const Sums& layer, Sums* whole);
  static StepReport::Layer ToLayer(const Sums& sums);
  std::vector<Sums> SumLayers() const;

  const RunSpec* const spec_;
  const LayerGroups* const layers_;
  std::vector<kernels::Statistics> tensors_;
  std::vector<bool> updated_, measured_;
};

}  // namespace ballast
