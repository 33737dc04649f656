// Tells when the loss spikes.
//
// A single loss far above the others is no spike: of 128 losses of a healthy training, one in a hundred lies above 3.2
// standard deviations, since batches differ, and the next loss is as usual. A spike is damage to the weights, so it
// lasts. Hence: a loss above the median of the last 128 by `sigmas` spreads begins what may be a spike; it is one once 5
// of the 10 losses from there on lie above the median by 2 spreads. A loss that is not finite, or above the median by 16
// spreads, is one at once. The spread is 1.4826 times the median deviation from the median, the standard deviation of a
// normal distribution, and at least a thousandth of the median; median and spread are those of before it began, and
// one spike among the 128 does not hide the next, as it would in a mean. A spike is over after ten losses in a row that
// are not above 2 spreads; until then another high loss belongs to it.
//
// Where some batches are harder than others, their losses are high, and no spike. So where many of the 128 were high, 5
// of 10 are not enough: as many are wanted as chance alone would make of them once in 10,000 times, if each loss were
// high or not for itself. And a loss is only one at once if it is also four times as far above the median as any of the
// 128.
//
// The 3.2 and the 10 are those of StableAdamW's authors (arXiv 2304.13013, appendix D), who also want several deviations
// within ten steps; the 5, 2, 16 and 4 were chosen so that healthy trainings have no spike
// (tests/studies/results/spike_study.md, tests/server/stability/loss_noise_test.cc).
//
// A copyable value; thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "server/stability/running_window.h"

namespace ballast {

class LossWatch {
 public:
  static constexpr uint64_t kLooks = 10;  // losses that a spike shows itself in

  struct Spike {
    uint64_t since = 0;  // its first step
    double loss = 0;     // at that step
    double limit = 0;    // that this loss was above; 0: it is not finite
  };
  static constexpr uint32_t kHighLosses = 5;
  // What a loss is compared with; a spread of 0: nothing is known, and only what is not finite is high.
  struct Usual {
    double median = 0, spread = 0;
    double huge = 0;                // a loss above it is a spike at once
    uint32_t wanted = kHighLosses;  // high losses that make a spike
  };
  struct State {
    RunningWindow losses = {};
    uint64_t since = 0;  // the first step of the spike there is, or may be; 0: none
    double first_loss = 0;
    Usual before = {};             // it began
    uint32_t looks = 0, high = 0;  // losses from there on, and those of them that were high
    uint32_t calm = 0;             // losses in a row that were not
    bool spike = false;            // it is one
  };

  explicit LossWatch(double sigmas) : sigmas_(sigmas) {}

  // For each step's loss once, in order. `warm`: else only one that is not finite counts. The spike at the step at which
  // it is known to be one.
  std::optional<Spike> Observe(uint64_t step, double loss, bool warm);
  // The spike that the loss would be high in, known to be one by then. Changes nothing.
  std::optional<Spike> Foresee(uint64_t step, double loss, bool warm) const;
  // The first step of the spike that is going on; 0: none is.
  uint64_t spike_since() const { return state_.spike ? state_.since : 0; }

  const State& state() const { return state_; }
  void GoOnFrom(State state) { state_ = std::move(state); }

 private:
  Usual Now() const;
  double LimitOf(double loss, const Usual& before) const;  // as in Spike

  double sigmas_;
  State state_;
};

}  // namespace ballast
