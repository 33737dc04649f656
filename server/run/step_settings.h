// What the open step is made with: the values that its ranks gave, the ranks that are left out, and the clipping that
// was decided. After the step has closed, what it was made with, until the next one opens. A value; thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/run/rank_stream.h"
#include "server/step/step_verdict.h"

namespace ballast {

struct StepSettings {
  std::vector<std::vector<double>> hyper = {};       // by group, complete, in the kernel's order
  std::vector<message::GroupValue> end_values = {};  // that win over them once the step is judged
  std::optional<double> max_grad_norm = {};          // that wins over the run's
  // In a part of a run, what the gradients of all its parts measure: the step is judged by that.
  std::optional<GradientFindings> whole = {};
  bool checkpoint = false;              // is due when it closes: a rank says so
  std::vector<uint32_t> left_out = {};  // ranks, ascending
  double loss_scale = 1;
  float clip = 1;  // of the gradient over all tensors

  // All ranks gave the same: the step machine has seen to that.
  void TakeEndValues() {
    for (const message::GroupValue& v : end_values) hyper[v.group][v.hyper] = v.value;
  }
  // How many of a world of ranks take part in the step.
  uint32_t RanksOf(uint32_t world) const { return world - static_cast<uint32_t>(left_out.size()); }
};

}  // namespace ballast
