// Text on the wire. The strings of a message are UTF-8: one that is not is logged by Protobuf where it is written, and
// the message cannot be read where it comes.
#pragma once

#include <google/protobuf/message.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ballast {

// Bytes of the valid character at the start of `bytes` (not empty); 0: there is none.
size_t Utf8CharacterLength(std::string_view bytes);

// Of one valid character.
char32_t CodePointOf(std::string_view character);
// Whether a terminal or a page obeys the character, or shows nothing where it stands: control characters, and those that
// end lines, turn the direction of writing, as U+202E does, or have no width.
bool IsUnseen(char32_t code_point);
// As a string of JSON may have any character (RFC 8259): \n, \uNNNN, or two such.
std::string JsonEscape(char32_t code_point);

// INVALID_ARGUMENT names the first field of `message` that is not UTF-8, such as tensors[3].name, and shows its bytes.
absl::Status CheckText(const google::protobuf::Message& message);

}  // namespace ballast
