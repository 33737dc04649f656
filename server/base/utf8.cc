#include "server/base/utf8.h"

#include "proto/utf8.h"

namespace ballast {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

std::string ValidUtf8(std::string_view bytes, size_t max_bytes) {
  std::string out;
  while (!bytes.empty()) {
    const size_t length = Utf8CharacterLength(bytes);
    const std::string_view character = length > 0 ? bytes.substr(0, length) : kReplacement;
    if (out.size() + character.size() > max_bytes) break;
    out.append(character);
    bytes.remove_prefix(length > 0 ? length : 1);
  }
  return out;
}

}  // namespace ballast
