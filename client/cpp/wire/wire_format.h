// The formats of payloads: their sizes, and how weights that are served in a narrow format are decoded to the one that
// the trainer computes in.
//
// Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast {

// What shares a scale: the format has none; a row; the whole tensor.
enum class Scaling { kNone, kRow, kTensor };

struct WireFormat {
  absl::string_view name;
  uint64_t bytes;  // of an element
  Scaling scaling;
  bool computes;  // a trainer computes in it
};
// nullptr for a name that this client does not know.
const WireFormat* FindFormat(absl::string_view name);
// Bytes of one element; 0 for an unknown name.
uint64_t FormatBytes(absl::string_view name);

// Elements of a tensor as they are served, from element `first` on.
struct EncodedWeights {
  absl::string_view format;
  uint64_t first = 0;
  uint64_t row_length = 0;  // elements that share a scale; 0: none
  absl::Span<const std::byte> codes;
  absl::Span<const float> scales;
};

// Scales that elements [first, last) need.
uint64_t ScalesNeeded(uint64_t row_length, uint64_t first, uint64_t last);

// Decodes into `dtype` (fp32, bf16 or fp16; rounded to nearest even from fp32, finite values stay finite). A weight is
// code * scale / 127 for int8, the number that the code stands for in the others. UNIMPLEMENTED: a format that this
// client cannot decode. INTERNAL: the wrong number of scales.
absl::Status DecodeWeights(const EncodedWeights& weights, absl::string_view dtype, std::byte* out);

}  // namespace ballast
