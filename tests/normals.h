// Numbers that are distributed nearly normally: each is the sum of four uniform ones, at most 3.46 deviations from 0. Fixtures
// draw millions of them, which takes std::normal_distribution, unoptimized, longer than all that is tested: these take no
// logarithm, are compiled with optimization in every build, and are the same everywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace ballast::testing {

// Of mean 0 and this standard deviation.
void FillNormal(uint64_t seed, float deviation, absl::Span<float> values);
std::vector<float> NormalValues(uint64_t seed, float deviation, uint64_t count);

}  // namespace ballast::testing
