// Has the devices sum, measure, try and update the tensors of a run's steps, with the step's settings, and gathers what they
// answer. Keeps what a tensor's next update needs from its last: the average of its norm where it is clipped by its
// own, and its learning rate where curvature is probed.
//
// Strand-confined. Answers come on the strand, never within the call that asks. An answer about a step that is no
// longer open is not taken into the statistics.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"

#include "server/run/gradient_pool.h"
#include "server/run/step_settings.h"
#include "server/run/step_statistics.h"
#include "server/spec/layers.h"
#include "server/spec/run_spec.h"
#include "server/stability/tensor_clip.h"
#include "server/step/step_machine.h"
#include "server/store/parameter_store.h"
#include "server/store/snapshot_ring.h"

namespace ballast {

class TensorUpdater {
 public:
  // All outlive the updater.
  struct Environment {
    const RunSpec* spec;
    const LayerGroups* layers;
    const StepMachine* machine;
    const StepSettings* settings;
    ParameterStore* store;
    GradientPool* pool;
    // Before the tensor's update by these values: calls `then`, at once or later on the strand, when the gradient is
    // written down. nullptr: nobody writes it.
    std::function<void(uint32_t tensor, const ParameterStore::UpdateValues& values, absl::AnyInvocable<void()> then)>
        log = nullptr;
    // An update is done. `result` is nullptr where a rewind has undone it.
    std::function<void(const effect::Update& update, const TaskResult* result)> on_updated;
  };
  using Done = absl::AnyInvocable<void()>;

  explicit TensorUpdater(Environment environment);

  void Begin();  // a step is open
  // Has a sum of the tensor's made. What is asked of the tensor afterwards finds it there.
  void Sum(uint32_t tensor, SumTask sum, Done done);
  void Update(const effect::Update& update);
  // As Sum, of all of the tensor's gradient, and then Update; one task of the device, where nothing has to come between.
  void SumAndUpdate(const effect::Update& update, SumTask sum, Done summed);
  // What the step's gradient of the tensor has, before any clipping.
  void Measure(uint64_t step, uint32_t tensor, Slab slab, Done done);
  // What the tensor's update would show. The step is probed from here on, and its updates do not probe the curvature
  // again: whoever probes a tensor asks for its curvature too, where it has one (ProbesCurvature).
  void DryUpdate(uint64_t step, uint32_t tensor, Slab slab, Done done);
  void ProbeCurvature(uint64_t step, uint32_t tensor, Slab slab, Done done);
  bool probed() const { return probed_; }

  bool idle() const { return under_way_ == 0; }  // all asked for is answered
  // What the open step, or the last one, measured.
  const StepStatistics& statistics() const { return statistics_; }
  double busy_s() const { return busy_s_; }                // the devices, with measures and updates
  double last_update_s() const { return last_update_s_; }  // MonotonicSeconds; 0: no tensor is updated yet

  // What a snapshot keeps.
  void Remember(RunMemory* memory) const;
  // Updates under way are undone.
  void GoBackTo(const RunMemory& memory);

 private:
  ParameterStore::UpdateValues ValuesOf(uint64_t step, uint32_t tensor, Slab slab);
  void Submit(const effect::Update& e, ParameterStore::UpdateValues values);
  // Of the update, which `rewinds` rewinds came before.
  void Log(const effect::Update& e, ParameterStore::UpdateValues values, std::vector<double> hyper, uint64_t rewinds);
  void SubmitLogged(const effect::Update& e, const ParameterStore::UpdateValues& values);
  // rewinds: how many there had been when the update was submitted.
  void OnUpdated(const effect::Update& e, float clip, uint64_t rewinds, const TaskResult& result);
  // Before the tensor's update with these values, or the skip of its step; `done` once it is known.
  void AskCurvature(uint32_t tensor, const ParameterStore::UpdateValues& values, Done done);
  bool IsOpen(uint64_t step) const { return environment_.machine->step_open() && environment_.machine->step() == step; }

  const Environment environment_;
  StepStatistics statistics_;
  std::optional<TensorClip> tensor_clip_;
  std::vector<double> last_lr_;  // of the last update, by tensor, where curvature is probed; 0: none
  uint32_t under_way_ = 0;       // submitted and not done, of any step
  uint64_t rewinds_ = 0;         // so far
  // The open step.
  bool probed_ = false;
  double busy_s_ = 0, last_update_s_ = 0;
};

}  // namespace ballast
