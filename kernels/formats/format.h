// What every format is made of. All of it is pure and written over a vector type (kernels/simd/vector.h). The driver
// loads, stores, widens, packs and takes the maximum of a block.
//
// A master format: kName, kPlanes, Decode(words) -> value, Encode<V, kStochastic>(value, random bits) -> words, one
// word a plane; kSaturated, the largest magnitude that it holds: what is loaded is brought down to it. A format of two
// components that a rule computes (kPaired) decodes to their sum, and has Component(word) for each. A format with
// kManyRegisters needs more than 168 registers for an update on a GPU.
//
// A state format: kName and a moment for each kind of moment that a rule may have: Signed (m), NonNegative (v) and, for
// the second component of a v of two, Residual. A moment has
//   kPlanes          codes, one an element; then, where kScalePer > 0, scales, one for every kScalePer elements (32 or
//                    256)
//   kStoresRoot      it is given sqrt(v), and decodes to v
//   kLargestBits     a block with a larger magnitude is rejected
//   Scale(absmax)    the stored scale, from the largest magnitude of what is encoded, as bits
//   Decoder, Encoder kNumbers numbers a block, made by Of() for several blocks at once, a block in each position
//                    of a vector; the driver spreads one block's numbers over a vector, and Decode or Encode then works
//                    on its elements
//   Saturated(code)  whether the code is at its largest level
// Words that are loaded are extended by their sign where the plane says so, else by zeros.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/simd/scalar.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// A plane as a format declares it: `bytes` bytes for every `per` elements.
inline constexpr int kWhole = -1;  // an encoded word has no other bits: above what is stored there are zeros
struct StoredPlane {
  const char* suffix;
  uint32_t bytes;
  uint32_t per;
  bool sign = false;  // words are sign-extended when loaded
  int at = kWhole;    // the first of the bits of an encoded word that are stored; others may be anything
};

inline constexpr uint32_t kLargestBits = 0x7b000000u;        // 2^119
inline constexpr uint32_t kLargestFiniteBits = 0x7f7fffffu;  // for a v that is stored as it is

// The largest magnitude of a weight that an update stores.
template <class Master>
inline constexpr uint32_t kLargestWeightBits = std::min(kLargestBits, Master::kSaturated);

// Whether two pairs of words may stand for one value, and an update that changes nothing may take the other: such weights
// are compared by their values.
template <class Master>
inline constexpr bool kIsComparedByValue = requires {
  Master::kHasTwins;
};

// The stored words of one value, one for each of a master's planes.
template <class V>
struct Words {
  typename V::U word[2];
};

// The largest value that a moment takes: where it stores roots, the square of its bound.
template <class S>
inline constexpr float kLargestValue = [] {
  const double bound = static_cast<double>(std::bit_cast<float>(S::kLargestBits));
  return static_cast<float>(S::kStoresRoot ? bound * bound : bound);
}();

// What a moment without scales has in place of Decoder and Encoder numbers.
template <class V>
struct NoNumbers {
  static constexpr int kNumbers = 0;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
