// What every format is made of.
//
// A master format is kName, kPlanes, Decode(words) and Encode(x, random bits, stochastic): one value to one word for
// each plane and back. A state format is kName and a slot type for each kind of slot a rule may have (Signed,
// NonNegative). A slot is kPlanes (a code for every element, then, where there is one, a scale for every block of 32),
// kStoresRoot (it is given sqrt(x) of a value x and decodes to x), Scale(largest |x| of the block, as bits) and
// Block(scale), which decodes and encodes. All are pure, over a lane type; loading, storing, widening and the block's
// maximum are the driver's.
#pragma once

#include <cstdint>

#include "kernels/lanes/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// A plane as a format declares it: `bytes` bytes for every `per` elements.
struct StoredPlane {
  const char* suffix;
  uint32_t bytes;
  uint32_t per;
};

// The stored words of one value, one for each of a master's planes, zero-extended.
template <class L>
struct Words {
  typename L::U word[2];
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
