// What a run is doing, as people and alerts see it, and for how long one of its steps may stay open before that is no
// longer training.
//
//   waiting    for trainers or its first step; or its trainers were lost, and nobody has come back
//   training   a rank is there, and a step is open or was closed a moment ago
//   idle       a rank is there, and no step for a while: an evaluation, a checkpoint of the trainer's, a pause
//   finished   it has trained, and each rank left cleanly
//   failed     it is lost, and says why
//
// A while is ten steps of the run's own, as the last ones went from close to close, and at least 30 s. Before two steps
// have closed it is ten minutes, since a first step may compile the model. A pause counts among the steps as no more
// than one such while, so that it is soon forgotten.
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
    uint32_t held = 0;  // connected, or away for less than their lease
    uint32_t lost = 0;  // away for longer, without having left cleanly, and nobody has taken their place
  };

  void OnOpened() { trained_ = true; }  // a step, now or before the run was read from the disk
  void OnClosed(double now_s);

  // Never kFailed.
  RunState At(double now_s, bool step_open, Ranks ranks) const;
  double stall_after_s() const;
  // From close to close, of the last steps; 0: not known.
  double pace_s() const { return pace_s_; }

 private:
  bool trained_ = false;
  double closed_at_s_ = 0;  // the last step; 0: none yet
  double pace_s_ = 0;
};

}  // namespace ballast
