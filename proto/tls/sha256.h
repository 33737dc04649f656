// SHA-256, as the text that files and messages have it. Thread-safe.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ballast {

// 64 digits, in lower case.
std::string Sha256Hex(absl::string_view bytes);

}  // namespace ballast
