// The YAML file: from text to values of the schema, each with the line it stands on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast {

struct FileValue {
  std::string path;  // of a key in ConfigKeys()
  std::string text;
  std::string where;                                   // ballast.yaml:7
  std::optional<std::vector<std::string>> items = {};  // of a list that is written as one; then there is no text
};

// FAILED_PRECONDITION naming the file, the line and the fix: no file, no text, no YAML, a key that is unknown or comes twice, a
// section where a value belongs or the reverse.
absl::StatusOr<std::vector<FileValue>> ReadConfigFile(const std::string& file);
// The same for text already read; `file` is its name in errors.
absl::StatusOr<std::vector<FileValue>> ParseConfigText(const std::string& text, const std::string& file);

}  // namespace ballast
