#include "client/cpp/wire/bitmap.h"

#include <algorithm>

namespace ballast {

std::string PackBits(const std::vector<bool>& bits) {
  std::string bytes((bits.size() + 7) / 8, '\0');
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) bytes[i / 8] = static_cast<char>(static_cast<unsigned char>(bytes[i / 8]) | (1u << (i % 8)));
  }
  return bytes;
}

std::vector<bool> UnpackBits(const std::string& bytes, size_t count) {
  std::vector<bool> bits(count);
  for (size_t i = 0; i < std::min(count, bytes.size() * 8); ++i) {
    bits[i] = (static_cast<unsigned char>(bytes[i / 8]) >> (i % 8)) & 1u;
  }
  return bits;
}

}  // namespace ballast
