// Which weights of a run: its own, or one of their averages.
#pragma once

#include <cstdint>
#include <optional>

namespace ballast {

// The average's place in RunSpec::averages; none: the weights themselves.
using WeightSeries = std::optional<uint32_t>;

}  // namespace ballast
