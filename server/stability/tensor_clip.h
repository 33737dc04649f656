// Clipping tensor by tensor, which needs no norm over all of them and so no step that waits for its last gradient
// (AdaGC, arXiv 2502.11034). A gradient's norm is held to `relative` times a moving average of the norms that were
// taken; in a tensor's first `warmup` steps to a fixed limit, while the average is the least norm taken:
//
//   warm-up:    h = min(1, absolute / norm);           average = min(average, h norm)
//   afterwards: h = min(1, relative average / norm);   average = beta average + (1 - beta) h norm
//
//   TensorClip clip({}, tensors);
//   update.clip = clip.Next(tensor, std::sqrt(measured.grad_sq));  // of a MeasureTask
//
// Where this is not the paper:
//  - its warm-up clips all tensors by the one norm of them all; here the limit is each tensor's own.
//  - a norm that is not finite gives 0, as limit / norm does. A measured norm leaves out the blocks with an element
//    that is not finite (they are refused whatever the coefficient), so it is one whose squares pass a sum's range: no
//    other coefficient would hold it. It says nothing of the tensor's usual norm: the average and the steps stay.
//  - a norm of 0 leaves the average and the steps alone, too: an average of 0 would hold the tensor to 0 for ever, and
//    rows that seldom have a gradient would be held to less the longer they waited.
//
// A pure value: a copy is a snapshot, and puts back what a step that is not applied has counted. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ballast {

class TensorClip {
 public:
  // The paper's defaults.
  struct Options {
    double absolute = 1.0;   // above 0
    double relative = 1.05;  // above 0
    double beta = 0.98;      // in [0, 1)
    uint64_t warmup = 100;   // steps of each tensor
  };
  // What is remembered of one tensor.
  struct Average {
    double norm = 0;     // of the gradients taken; meaningless before the first
    uint64_t steps = 0;  // that were counted
    bool operator==(const Average&) const = default;
  };

  TensorClip(const Options& options, size_t tensors) : options_(options), averages_(tensors) {}

  // The coefficient, in [0, 1], for the tensor's next gradient. `norm`: of that gradient, before any clipping.
  float Next(size_t tensor, double norm);

  const std::vector<Average>& averages() const { return averages_; }
  // As many as there are tensors: those of a snapshot.
  void set_averages(std::vector<Average> averages) { averages_ = std::move(averages); }

 private:
  Options options_;
  std::vector<Average> averages_;  // by tensor
};

}  // namespace ballast
