// The table of keys: each key of the schema with the member of Config that it sets and the values that it may have. A
// key needs its field in config.proto, its member in config.h and its row in config_keys.cc, and nothing else.
//
// Thread-safe: all state is immutable.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"

#include "server/config/config.h"

namespace ballast {

// A member of a Config, by its type.
using ConfigMember = std::variant<std::string*, bool*, uint32_t*, uint64_t*, double*, std::vector<std::string>*>;

struct ConfigRow {
  absl::string_view path;                             // limits.chunk_bytes
  ConfigMember (*member)(Config& config);             // that the key sets
  std::function<std::string(const Config&)> problem;  // what is wrong with its value; empty: nothing
};

// In the order in which values are checked: that of the schema, but a key that another one's check reads is before it.
const std::vector<ConfigRow>& ConfigRows();
// None: the schema has a key that the table does not.
const ConfigRow* FindConfigRow(absl::string_view path);

}  // namespace ballast
