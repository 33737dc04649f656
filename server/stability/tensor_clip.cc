#include "server/stability/tensor_clip.h"

#include <algorithm>
#include <cmath>

namespace ballast {

float TensorClip::Next(size_t tensor, double norm) {
  if (!std::isfinite(norm)) return 0;
  if (norm == 0) return 1;
  Average& average = averages_[tensor];
  const bool warm = average.steps > 0 && average.steps >= options_.warmup;  // there is an average to go by
  const double limit = warm ? options_.relative * average.norm : options_.absolute;
  const float coefficient = static_cast<float>(std::min(1.0, limit / norm));
  const double taken = static_cast<double>(coefficient) * norm;
  if (warm) {
    average.norm = options_.beta * average.norm + (1 - options_.beta) * taken;
  } else {
    average.norm = average.steps == 0 ? taken : std::min(average.norm, taken);
  }
  ++average.steps;
  return coefficient;
}

}  // namespace ballast
