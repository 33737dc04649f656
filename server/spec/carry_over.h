// Whether what is stored of a tensor can go on as another kernel stores it. Pure functions; thread-safe.
#pragma once

#include <cstdint>

#include "kernels/registry.h"

namespace ballast {

// How the kernel encodes state of this kind; nullptr: it has none, or none that is encoded by itself.
const kernels::MomentCodec* StateCodec(const kernels::Kernel& kernel, kernels::PlaneKind kind);

enum class CarryOver : uint8_t {
  kAsItLies,    // to the bit
  kConverted,   // decoded to fp32, which rounds weights that have more, and encoded anew, rounded to nearest
  kImpossible,  // one of the two keeps state of this kind that the other does not, or not by itself
};
CarryOver CarryOverOf(const kernels::Kernel& from, const kernels::Kernel& to, kernels::PlaneKind kind);

}  // namespace ballast
