// Decides about a run's steps from what they measure. A staged step, before it is applied: its gradients are measured,
// where its ranks have not asked for that before, and may be tried; then it is applied, with which clipping, skipped or
// aborted. Every step, when it is closed: which
// spikes it shows, and what the run does about them. Keeps what later steps are judged by.
//
// Strand-confined.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/metrics/metrics.h"
#include "server/run/step_settings.h"
#include "server/run/tensor_updater.h"
#include "server/spec/run_spec.h"
#include "server/stability/spike_detector.h"
#include "server/stability/spike_policy.h"
#include "server/step/step_machine.h"
#include "server/step/step_record.h"
#include "server/step/step_verdict.h"

namespace ballast {

class StepJudge {
 public:
  // All outlive the judge.
  struct Environment {
    const RunSpec* spec;
    const StepMachine* machine;
    StepSettings* settings;  // the judge decides `clip`
    TensorUpdater* updater;
    // Once for each Measure, on the strand, also for a step that has closed meanwhile.
    std::function<void(uint64_t step)> measured;
    // Once for each Judge, on the strand, perhaps within it; never for a step that has closed meanwhile.
    std::function<void(event::Verdict)> pronounce;
    std::function<void()> settle;  // the device has answered, and all that the judge makes of it is done
  };
  // What the run does about a step's spikes, and why.
  struct Answer {
    SpikePolicy::Answer what = SpikePolicy::Answer::kGoOn;
    std::string why = {};
  };

  explicit StepJudge(Environment environment);

  void Begin();  // a step is open
  void AddLoss(uint32_t rank, uint32_t micro, double loss) { losses_[rank][micro] = loss; }
  void AddLossIfNone(uint32_t rank, uint32_t micro, double loss) { losses_[rank].try_emplace(micro, loss); }
  void ForgetLosses(uint32_t rank) { losses_[rank].clear(); }
  // The loss of the open step, or of the last: the mean of what the ranks told, each with the same weight.
  std::optional<double> Loss() const;
  std::optional<uint32_t> FirstNonfiniteLoss() const;  // its rank

  void Measure(const effect::Measure& measure);
  bool measured() const { return measured_; }  // all gradients of the open step, or of the last
  void Judge(const effect::Judge& judge);
  bool awaits_answers() const { return awaited_ > 0; }  // of the device

  // What the step that is being closed shows: fills in spikes, curvature_ratio and layer_rms. Each step once. One that
  // was discarded shows no spike, and later steps are not judged by it.
  void Observe(StepRecord* record);
  // What the detector found in a step that it observed.
  SpikeReport ReportOf(const StepRecord& record) const;
  Answer AnswerTo(const StepRecord& record);  // each step once

  // What a snapshot keeps, and the way back to it.
  const SpikeDetector& detector() const { return detector_; }
  void GoBackTo(const SpikeDetector& past) { detector_.GoBackTo(past); }
  // What it has done about spikes, and its way into a run that goes on from this one.
  const SpikePolicy& policy() const { return policy_; }
  void set_policy(SpikePolicy past) { policy_ = std::move(past); }
  // As another run's that goes on here, its scores with it.
  void set_detector(const SpikeDetector& past) { detector_.GoOnFrom(past.state()); }

 private:
  void Ask(uint64_t step, const std::vector<std::optional<Slab>>& slabs);
  void OnAnswer();
  void OnAllAnswered();
  bool IsOpen(uint64_t step) const;
  void JudgeMeasured();
  // Of all the run's gradients, as far as this daemon knows of them.
  GradientFindings WholeFindings() const;
  void DryUpdate(uint32_t tensor, Slab slab);
  void Pronounce(event::Verdict verdict);
  // Skips a step that would else be applied, where the run's policy wants that.
  void JudgeSpikes(event::Verdict* verdict);
  StepFindings FindingsOf(uint64_t step) const;

  const Environment environment_;
  SpikeDetector detector_;
  SpikePolicy policy_;
  std::vector<std::map<uint32_t, double>> losses_;  // of the open step, by rank and micro-batch
  std::vector<std::optional<Slab>> judged_;         // gradients that are to be judged, by tensor
  uint32_t awaited_ = 0;                            // answers about them
  uint64_t measuring_ = 0;                          // the step that is being measured for its ranks; 0: none
  uint64_t judging_ = 0;                            // the step that is being judged; 0: none
  bool measured_ = false;
  event::Verdict verdict_;  // of its gradients by themselves
};

}  // namespace ballast
