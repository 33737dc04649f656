// Bitmaps as the wire carries them: bit i is bit i % 8 of byte i / 8.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ballast {

std::string PackBits(const std::vector<bool>& bits);

// Bits that `bytes` does not reach are false, those past `count` are dropped.
std::vector<bool> UnpackBits(const std::string& bytes, size_t count);

}  // namespace ballast
