// Sums and products of sizes that a client names. One that does not fit into 64 bits is kUncountable instead of
// wrapping around, and so is every sum with it. Pure functions; thread-safe.
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

// Adds to a sum.
constexpr void Add(uint64_t* sum, uint64_t more) { *sum = Sum(*sum, more); }

}  // namespace ballast
