// Which weights of a run, and in which format.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/registry.h"

namespace ballast {

struct WeightSeries {
  std::optional<uint32_t> average = {};           // its place in RunSpec::averages; none: the weights themselves
  std::optional<kernels::WireIndex> format = {};  // of all tensors; none: each in its serving format
  bool operator==(const WeightSeries&) const = default;
};

}  // namespace ballast
