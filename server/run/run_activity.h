// What a run is doing, as people and alerts see it, and for how long one of its steps may stay open before that is no
// longer training.
//
//   waiting    for trainers or its first step; or its trainers were lost, and nobody has come back
//   training   a rank is there, and a step is open or was closed a moment ago
//   idle       a rank is there, and no step for a while: an evaluation, a checkpoint of the trainer's, a pause
//   finished   it has trained, and each rank left cleanly
//   failed     it is lost, and says why
//
// A while is ten steps of the run's own, as half of the last ones went from close to close, or faster, and at least 30 s.
// Before two steps have closed it is ten minutes, since a first step may compile the model. A pause among them is one long
// step of many.
//
// What the steps took counts as training from their begin to their close, and before that, where the next gradients are
// computed, as one step's time at most: what is longer is a pause.
//
// A value without a clock of its own: times are MonotonicSeconds. Thread-compatible.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ballast {

enum class RunState { kWaiting, kTraining, kIdle, kFinished, kFailed };
inline constexpr std::array<std::string_view, 5> kRunStateNames = {"waiting", "training", "idle", "finished", "failed"};
constexpr std::string_view NameOf(RunState state) { return kRunStateNames[static_cast<size_t>(state)]; }

class RunActivity {
 public:
  // By the processes that had them.
  struct Ranks {
    uint32_t held = 0;  // connected, away for less than their lease, or returning after a rewind
    uint32_t lost = 0;  // away for longer, without having left cleanly, and nobody has taken their place
  };

  void OnTrained() { trained_ = true; }  // before the run was read from the disk
  void OnOpened(double now_s);           // a step
  void OnClosed(double now_s, bool updated = true);
  // A checkpoint of what there is now; and that the last one begun is on the disk.
  void OnCheckpointBegun() { begun_s_ = training_s_; }
  void OnCheckpointWritten() { saved_s_ = begun_s_; }

  // Never kFailed.
  RunState At(double now_s, bool step_open, Ranks ranks) const;
  double stall_after_s() const;
  // From close to close, of the last steps; 0: not known.
  double pace_s() const { return pace_s_; }
  // Training that the last checkpoint does not have.
  double unsaved_s() const { return training_s_ - saved_s_; }

 private:
  static constexpr size_t kPaceSteps = 16;  // so many make the pace

  void Remember(double took_s);

  bool trained_ = false;
  double opened_at_s_ = 0;                             // the last step
  double closed_at_s_ = 0;                             // likewise; 0: none yet
  std::array<double, kPaceSteps> took_s_ = {};         // the last steps, from close to close
  size_t took_ = 0;                                    // so many, ever
  double pace_s_ = 0;                                  // their median
  double training_s_ = 0, begun_s_ = 0, saved_s_ = 0;  // in all; when a checkpoint was begun; of the last one written
};

}  // namespace ballast
