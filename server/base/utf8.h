// Valid UTF-8 from any bytes, for labels and log lines: each invalid byte becomes U+FFFD.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>

namespace ballast {

// At most max_bytes long; cut between characters. Thread-safe.
std::string ValidUtf8(std::string_view bytes, size_t max_bytes = std::numeric_limits<size_t>::max());

}  // namespace ballast
