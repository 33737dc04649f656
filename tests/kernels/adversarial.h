// Inputs meant to break a kernel.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/tensor.h"

namespace ballast::kernels {

// Finite patterns of every size up to 2^100, zeros, subnormals and ties. One block in sixteen gets any pattern at all:
// NaN, infinities and what overflows.
inline std::vector<float> Adversarial(uint64_t seed, uint64_t n) {
  Normals random(seed);
  std::vector<float> values(n);
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t word = static_cast<uint32_t>(random.Word());
    // Each block has an exponent of its own, and its elements reach 24 powers of two below.
    const uint32_t largest = 2 + static_cast<uint32_t>((i / kBlock + seed) * 0x9E3779B97F4A7C15ull >> 33) % 140;
    const uint32_t exponent = largest - std::min(largest, word >> 3 & 0x1f);
    uint32_t bits = (word & 0x80000000u) | exponent << 23 | (word >> 8 & 0x7fffff);
    if (word % 16 == 0) bits &= 0xff808000;  // few digits: ties
    if (word % 19 == 0) bits &= 0x80000000;
    if (i / kBlock % 32 == 5) bits = static_cast<uint32_t>(random.Word());
    values[i] = std::bit_cast<float>(bits);
  }
  return values;
}

// Numbers of one size in a row of 256, from 2^-70 to 2^29, another row by row; every sixteenth row is zeros. What divides
// by a row's numbers meets the ends of its range, one row at a time.
inline std::vector<float> Narrow(uint64_t seed, uint64_t n) {
  std::vector<float> values = Normals(seed).Vector(n, 1);
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t row = i / kPad, drawn = (row + 7 * seed) * 0x9E3779B97F4A7C15ull >> 33;
    values[i] = row % 16 == 15 ? 0.0f : std::ldexp(values[i], static_cast<int>(drawn % 100) - 70);
  }
  return values;
}

// Finite values; the oracle's encoding saturates them where a format needs it.
inline std::vector<float> Finite(std::vector<float> values) {
  for (float& x : values) x = std::isfinite(x) ? x : 0.0f;
  return values;
}

}  // namespace ballast::kernels
