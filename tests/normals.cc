#include "tests/normals.h"

#include "tests/split_mix.h"

namespace ballast::testing {

void FillNormal(uint64_t seed, float deviation, absl::Span<float> values) {
  const float unit = deviation * 1.7320508f * 0x1p-16f;  // a sum of four has a variance of 2^32 / 3
  for (float& value : values) {
    const uint64_t word = SplitMix(&seed);
    const auto sum =
        static_cast<int32_t>((word & 0xffff) + (word >> 16 & 0xffff) + (word >> 32 & 0xffff) + (word >> 48));
    value = unit * static_cast<float>(sum - 2 * 0xffff);
  }
}

std::vector<float> NormalValues(uint64_t seed, float deviation, uint64_t count) {
  std::vector<float> values(count);
  FillNormal(seed, deviation, absl::MakeSpan(values));
  return values;
}

}  // namespace ballast::testing
