// Bitmaps as the wire carries them, for both of its ends: bit i is bit i % 8 of byte i / 8 (proto/PROTOCOL.md,
// MicroEnd).
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace ballast {

std::string PackBits(const std::vector<bool>& bits);

// Bits that `bytes` does not reach are false, those past `count` are dropped.
std::vector<bool> UnpackBits(absl::string_view bytes, size_t count);

// The first bit from `count` on that is set; a peer leaves all of them clear.
std::optional<size_t> FirstBitPast(absl::string_view bytes, size_t count);

}  // namespace ballast
