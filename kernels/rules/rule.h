// What every optimizer rule is made of: kName, kHypers, kSlots, Prepare (host constants, in double, rounded once) and
// Apply (one element, over a lane type). Rules are element-wise: what needs a whole matrix or a second pass is not one.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/lanes/scalar.h"
#include "kernels/registry.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

enum class Slot { kSigned, kNonNegative };
inline constexpr int kMaxSlots = 2;

// One element before and after the update.
template <class L>
struct Element {
  typename L::F grad, weight;
  typename L::F slot[kMaxSlots];
};
template <class L>
struct Updated {
  typename L::F weight;
  typename L::F delta;  // d: the update wanted, before any rounding of the weight
  typename L::F slot[kMaxSlots];
  typename L::F root[kMaxSlots];  // sqrt of a NonNegative slot
  typename L::F rms_term;         // g^2 / max(vhat, eps^2)
};

// b^t by square-and-multiply, since pow differs between C libraries.
inline double Power(double b, uint64_t t) {
  double result = 1;
  for (; t > 0; t >>= 1, b *= b) {
    if (t & 1) result *= b;
  }
  return result;
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
