#include "client/cpp/parts/server_list.h"

#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {

absl::StatusOr<std::vector<std::string>> SplitServers(const std::string& server) {
  const std::vector<std::string> servers = absl::StrSplit(server, ',');
  std::set<std::string> seen;
  for (const std::string& one : servers) {
    if (one.empty()) return absl::InvalidArgumentError("server: an address between commas is empty");
    if (!seen.insert(one).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("server: '", one, "' is named twice; each daemon of a run has a part of its own"));
    }
  }
  return servers;
}

}  // namespace ballast
