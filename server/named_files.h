// What the configuration names on this machine: whether it is there, and this user, who is to be the daemon's, can use it.
// Nothing is changed, so that it can be asked beside a daemon that runs. Thread-safe: functions without a state.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "server/config/config.h"
#include "server/config/config_check.h"

namespace ballast {

// storage.import_dir without a slash at its end, by way of which a link would be followed; empty: none.
std::string ImportDir(const Config::Storage& storage);

// Of storage.on_published and storage.import_dir, which must be there when the daemon starts, not when they are first
// wanted. The status names the key.
absl::Status CheckStorageNames(const Config::Storage& storage);

// All that a daemon would want at its start or later, but what CheckTlsFiles and the access file are read for: the names of
// storage, storage.dir itself, and the files that a relay shows its upstream. Empty path: nothing is wrong.
ConfigError CheckNamedFiles(const Config& config);

}  // namespace ballast
