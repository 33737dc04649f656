// Moments that are loaded as they were decoded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/registry.h"

namespace ballast {

// `planes` hold n values as codec.encode made them, to nearest; the values may have been decoded from codes before. Where
// a block has another scale then, since its largest code had not been reached, finds that scale and those codes, and
// stores them: what is decoded from them is to the bit what was given. Of all other values nothing changes; after a few
// blocks of those it stops, since none was decoded so then. For formats of one byte an element with a bf16 or fp16 scale
// a block; in others nothing is to be found.
void RecoverCodes(const kernels::MomentCodec& codec, std::byte* const* planes, const float* values, uint64_t n);

}  // namespace ballast
