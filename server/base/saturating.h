// Sums and products of sizes that a client names: where one does not fit, it is kUncountable, which stays so and fits
// nowhere, instead of what is left of it. Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <limits>

namespace ballast {

inline constexpr uint64_t kUncountable = std::numeric_limits<uint64_t>::max();

constexpr uint64_t Sum(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? kUncountable : sum;
}

constexpr uint64_t Product(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kUncountable : product;
}

// Onto a sum.
constexpr void Add(uint64_t* sum, uint64_t more) { *sum = Sum(*sum, more); }

}  // namespace ballast
