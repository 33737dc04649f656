// A step after it closed: what became of it, and all that it measured. Made once, when the step closes; the metrics,
// the status, the history, the snapshots and the ranks' results read it. A figure of a step is a field here, with a
// default; it is filled where it is computed (StepStatistics, StepJudge, StepReporter, StepExecutor::RecordOf).
//
// A value; thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/stability/spikes.h"
#include "server/step/step_machine.h"

namespace ballast {

struct StepRecord {
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason = {};  // a word: why it was not applied
  std::string detail = {};  // for people
  bool discarded() const { return reason == kDiscarded; }
  std::vector<uint32_t> not_applied = {};  // tensors whose weights did not change; not in the history
  std::vector<uint32_t> left_out = {};     // ranks
  uint64_t checkpoint_step = 0;            // of the newest checkpoint on the disk when this one closed; 0: none
  uint64_t durable_step = 0;               // the last that survived a crash of the daemon when this one closed; 0: none

  double closed_at_s = 0;                       // Unix time
  double seconds = 0;                           // StepBegin to the last update
  double receive_seconds = 0;                   // first gradient byte to last
  double update_seconds = 0;                    // the devices were busy with measures and updates
  double wait_seconds = 0;                      // from the last StepEnd but one to the last
  uint32_t last_rank = 0;                       // whose StepEnd was the last
  uint64_t received_bytes = 0, sent_bytes = 0;  // payload, since the step before closed

  std::optional<double> loss = {};
  double learning_rate = 0;  // of the first group
  double grad_norm = 0;      // before clipping; 0 of a staged step that closed before it was measured
  double clip_coefficient = 1;
  // Of the elements that a rank converted to what it sends, the largest share of any rank's; none: no rank has counted.
  std::optional<double> gradient_flushed = {}, gradient_overflowed = {};
  uint64_t nonfinite_tensors = 0;
  uint64_t rejected_blocks = 0;
  uint64_t rejected_tensors = 0;  // how many tensors these are in; 0 too in a record that a checkpoint has kept
  // Over all layers together, at steps with full statistics; else none.
  std::optional<double> edq_ratio = {}, unchanged_ratio = {};
  std::optional<double> curvature_ratio = {};  // of the layer where it is largest
  std::vector<float> layer_rms = {};           // RMS_t by layer, of what was updated or tried; NaN: none
  std::vector<SpikeEvent> spikes = {};

  // For who is told when the step closes; a record that is kept has none of these.
  struct Layer {
    std::optional<double> rms_ratio;  // max over the layer's tensors; finite; none: no rule with a second moment
    // At steps with full statistics. hi: of the first component of a weight that has two, else none.
    std::optional<double> update_to_weight_ratio, edq_ratio, unchanged_ratio, hi_edq_ratio, hi_unchanged_ratio;
    double gradient_norm = 0;
  };
  std::vector<Layer> layers = {};       // by layer; tensors without an update this step left out
  std::vector<double> tensor_rms = {};  // RMS_t of every tensor updated that has one; for the distribution
};

}  // namespace ballast
