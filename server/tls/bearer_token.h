// A word that a request over HTTP must bring, read from a file. Thread-safe: functions without a state.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ballast {

// What the file holds, without blanks around it. FAILED_PRECONDITION names the file: others than its owner can read it,
// or it holds no word of 16 to 4096 visible characters.
absl::StatusOr<std::string> ReadToken(const std::string& file);

// Whether the header Authorization brings it, as "Bearer TOKEN"; or as "Basic ...", whatever the user's name, with the
// token for the password: the one form that a browser asks a person for. Takes as long whatever is wrong with it.
bool BringsToken(std::string_view authorization, std::string_view token);

}  // namespace ballast
