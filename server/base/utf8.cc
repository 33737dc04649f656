#include "server/base/utf8.h"

#include <cstdint>

namespace ballast {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// What a character with this first byte looks like (Unicode 15, table 3-7): its length, and the range of its second
// byte, which is what excludes overlong forms, surrogates and code points beyond U+10FFFF.
struct Form {
  size_t length = 0;  // 0: not a first byte
  uint8_t second_min = 0x80, second_max = 0xBF;
};

Form FormOf(uint8_t first) {
  if (first < 0x80) return {1};
  if (first >= 0xC2 && first <= 0xDF) return {2};
  if (first == 0xE0) return {3, 0xA0, 0xBF};
  if (first == 0xED) return {3, 0x80, 0x9F};
  if (first >= 0xE1 && first <= 0xEF) return {3};
  if (first == 0xF0) return {4, 0x90, 0xBF};
  if (first >= 0xF1 && first <= 0xF3) return {4};
  if (first == 0xF4) return {4, 0x80, 0x8F};
  return {};
}

// Bytes of the valid character at the start of `bytes` (not empty); 0: there is none.
size_t CharacterLength(std::string_view bytes) {
  const Form form = FormOf(static_cast<uint8_t>(bytes[0]));
  if (form.length > bytes.size()) return 0;
  for (size_t i = 1; i < form.length; ++i) {
    const auto byte = static_cast<uint8_t>(bytes[i]);
    const uint8_t min = i == 1 ? form.second_min : 0x80;
    const uint8_t max = i == 1 ? form.second_max : 0xBF;
    if (byte < min || byte > max) return 0;
  }
  return form.length;
}

}  // namespace

std::string ValidUtf8(std::string_view bytes, size_t max_bytes) {
  std::string out;
  while (!bytes.empty()) {
    const size_t length = CharacterLength(bytes);
    const std::string_view character = length > 0 ? bytes.substr(0, length) : kReplacement;
    if (out.size() + character.size() > max_bytes) break;
    out.append(character);
    bytes.remove_prefix(length > 0 ? length : 1);
  }
  return out;
}

}  // namespace ballast
