// The keys of the configuration, read from the descriptor of ballast.v1.DaemonConfig: a field of the proto is a key of
// the file, an environment variable, a flag and a line of --help without another line of code. Its row in
// config_keys.cc says which member of Config it sets. How a value is written follows from the field:
//
//   string          text
//   bool            true | false | on | off
//   uint64, *_bytes bytes: 65536, 64KiB, 64MB
//   double          seconds: 30s, 500ms, 1m30s
//   other uint32    a whole number
//   repeated string a list: a,b; in the file also [a, b] or a line each, where a comma needs no backslash
//   message         a section; its fields are limits.chunk_bytes in the file and as a flag
//
// Thread-safe: all state is immutable.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "server/config/config.h"
#include "server/config/config_keys.h"

namespace ballast {

struct ConfigKey {
  enum class Kind { kText, kSwitch, kCount, kBytes, kSeconds, kList };

  std::string path;  // limits.chunk_bytes
  Kind kind = Kind::kText;
  std::string doc;                 // the field's comment in config.proto
  const ConfigRow* row = nullptr;  // none: the table lacks it, which the tests find

  std::string environment() const;  // BALLAST_LIMITS_CHUNK_BYTES; of tls.key BALLAST_DAEMON_TLS_KEY
  absl::string_view placeholder() const;
};

// In the order of the schema.
const std::vector<ConfigKey>& ConfigKeys();
// Dots, hyphens and underscores are the same here, and so is case: "limits.chunk-bytes" finds limits.chunk_bytes.
const ConfigKey* FindConfigKey(absl::string_view spelling);

// The error says what is wrong with the text and what is wanted.
absl::Status SetConfigValue(const ConfigKey& key, absl::string_view text, Config* config);
// The same for a list whose items are at hand.
absl::Status SetConfigList(const ConfigKey& key, std::vector<std::string> items, Config* config);
// Text that SetConfigValue reads back as the same value.
std::string ConfigValueText(const ConfigKey& key, const Config& config);
// The items of a key that is a list.
std::vector<std::string> ConfigList(const ConfigKey& key, const Config& config);

// A list's items, without blanks around them, and its text. A comma in an item is written as \, and a backslash before
// one, or before another, as \\. Text of blanks is a list of nothing; the text of other empty items, and of blanks around
// one, is read back as something else.
std::vector<std::string> SplitList(absl::string_view text);
std::string JoinList(const std::vector<std::string>& items);

// "; did you mean 'ops_http'?" where one of the names is close, else nothing.
std::string DidYouMean(absl::string_view got, const std::vector<std::string>& names);
// The same, and then all the names.
std::string ValidNames(absl::string_view got, const std::vector<std::string>& names);

}  // namespace ballast
