// SplitMix64 (Steele, Lea, Flood 2014): random words for which a seed means the same everywhere.
#pragma once

#include <cstdint>

namespace ballast::testing {

// The next word; a state begins as any seed.
inline uint64_t SplitMix(uint64_t* state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace ballast::testing
