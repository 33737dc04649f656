#include "proto/bitmap.h"

#include <algorithm>

namespace ballast {
namespace {

bool BitIsSet(absl::string_view bytes, size_t i) {
  return ((static_cast<unsigned char>(bytes[i / 8]) >> (i % 8)) & 1u) != 0;
}

}  // namespace

std::string PackBits(const std::vector<bool>& bits) {
  std::string bytes((bits.size() + 7) / 8, '\0');
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) bytes[i / 8] = static_cast<char>(static_cast<unsigned char>(bytes[i / 8]) | (1u << (i % 8)));
  }
  return bytes;
}

std::vector<bool> UnpackBits(absl::string_view bytes, size_t count) {
  std::vector<bool> bits(count);
  for (size_t i = 0; i < std::min(count, bytes.size() * 8); ++i) bits[i] = BitIsSet(bytes, i);
  return bits;
}

std::optional<size_t> FirstBitPast(absl::string_view bytes, size_t count) {
  for (size_t i = count; i < bytes.size() * 8; ++i) {
    if (BitIsSet(bytes, i)) return i;
  }
  return std::nullopt;
}

}  // namespace ballast
