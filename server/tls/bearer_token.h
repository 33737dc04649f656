// The token (proto/tls/token_file.h) that a request over HTTP must bring. Thread-safe: functions without a state.
#pragma once

#include <string_view>

namespace ballast {

// Whether the header Authorization brings it, as "Bearer TOKEN"; or as "Basic ...", whatever the user's name, with the
// token for the password: the one form that a browser asks a person for. Takes as long whatever is wrong with it.
bool BringsToken(std::string_view authorization, std::string_view token);

}  // namespace ballast
