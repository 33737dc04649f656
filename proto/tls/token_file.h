// The file that holds a token: a secret word which whoever brings it is let in by. Thread-safe: functions without a
// state.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ballast {

// What the file holds, without blanks around it. FAILED_PRECONDITION names the file: others than its owner can read it,
// or it holds no word of 16 to 4096 visible characters.
absl::StatusOr<std::string> ReadToken(const std::string& file);

}  // namespace ballast
